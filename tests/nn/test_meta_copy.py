"""What `fdp.from_module` keeps of a module: its code and attributes as they are, and none of its memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import some
from torch import Tensor, nn

from fdp.errors import ArgumentError
from fdp.nn.modules import from_module


class Listed(nn.Module):
    """Finds its parts, and a tensor, through containers of its own and through a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order = {"all": [self.first, (self.second, nn.Dropout())]}
        self.weight_again = self.first.weight
        self.second_again = weakref.ref(self.second)

    def forward(self, x: Tensor) -> Tensor:
        first, (second, dropout) = self.order["all"]
        assert second is self.second_again()
        return dropout.train(self.training)(second(first(x))) + self.weight_again.sum()


class TiedAndShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.two(self.one(x)))


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    module[0].register_forward_hook(lambda part, args, output: output * 2)
    return module


FREED: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
    "lstm": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    "listed": Listed,
    "tied": TiedAndShared,
    "hooked": hooked,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


class Lambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.function = lambda x: self.part(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class HookOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.part.register_forward_hook(self.double)

    def double(self, part: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2 + self.part.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Slotted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        object.__setattr__(self, "factor", 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.factor


def outcome(call: Callable[[Tensor], Any]) -> Tensor:
    torch.manual_seed(3)
    with torch.no_grad():
        output = call(torch.linspace(-1, 1, 24).reshape(6, 4))
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("training", some([True, False]))
@pytest.mark.parametrize("name", FREED)
def test_memory_goes_with_the_module_and_its_function_stays(name: str, training: bool) -> None:
    module = FREED[name]().train(not training)
    apply, params, buffers = from_module(module)
    own = [weakref.ref(t) for t in [*module.parameters(), *module.buffers()]]
    # The last thing that happens to it, and no call sees it alive in that mode.
    module.train(training)
    expected = outcome(module)
    del module
    gc.collect()
    assert [reference() for reference in own] == [None] * len(own)
    assert torch.equal(outcome(lambda x: apply(params, buffers, x)[0]), expected)


def weight_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.parametrize("make", [Lambda, HookOfItsOwn, Slotted, weight_norm])
def test_modules_that_refer_to_themselves_compute_what_they_compute(make: Any) -> None:
    module = make()
    apply, params, buffers = from_module(module)
    changed = {key: value.detach() + 1 for key, value in params.items()}
    result = outcome(lambda x: apply(changed, buffers, x)[0])
    module.load_state_dict(changed)
    assert torch.equal(result, outcome(module))
    del module
    gc.collect()
    assert torch.equal(result, outcome(lambda x: apply(changed, buffers, x)[0]))


def test_gradients_go_to_the_given_tensors_of_a_listed_part() -> None:
    apply, params, buffers = from_module(Listed().eval())
    output = apply(params, buffers, torch.ones(2, 4))[0].sum()
    grads = torch.autograd.grad(output, list(params.values()))
    assert all(bool(grad.abs().sum() > 0) for grad in grads)


def test_attributes_are_followed_added_and_deleted() -> None:
    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(self, "factor", 1.0)

    module, x = Noted(), torch.ones(3)
    apply, params, buffers = from_module(module)
    assert torch.equal(apply(params, buffers, x)[0], x)
    module.factor = 2.0
    assert torch.equal(apply(params, buffers, x)[0], 2 * x)
    del module.factor
    assert torch.equal(apply(params, buffers, x)[0], x)
    module.factor = 3.0
    assert torch.equal(apply(params, buffers, x)[0], 3 * x)
    del module.factor, module
    assert torch.equal(apply(params, buffers, x)[0], x)


def test_a_part_that_is_kept_is_followed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    apply, params, buffers = from_module(module)
    dropout = module[1]
    del module
    dropout.eval()
    plain = apply(params, buffers, torch.ones(1, 4))[0]
    assert torch.equal(plain, nn.functional.linear(torch.ones(1, 4), params["0.weight"], params["0.bias"]))
    dropout.train()
    assert not torch.equal(apply(params, buffers, torch.ones(1, 4))[0], plain)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), HookOfItsOwn])
def test_hooks_that_come_later_run(make: Callable[[], nn.Module]) -> None:
    module = make()
    apply, params, buffers = from_module(module)
    before = outcome(lambda x: apply(params, buffers, x)[0])
    part = getattr(module, "part", module)
    part.register_forward_hook(lambda part, args, output: output * 2)
    assert torch.equal(outcome(lambda x: apply(params, buffers, x)[0]), 2 * before)


def replace_part(module: nn.Module) -> None:
    module[1] = nn.Tanh()


def add_part(module: nn.Module) -> None:
    module.append(nn.Tanh())


def close_over(module: nn.Module) -> None:
    module.later = lambda: module


def parametrize(module: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(module[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace_part, r"Sequential was changed (.|\n)* its parts \['1'\] are others"),
        (add_part, r"Sequential was changed (.|\n)* its parts \['2'\] are others"),
        (close_over, "its attribute 'later' holds parts of the module"),
        (parametrize, "the part '0' of Sequential was changed (.|\n)* it has become a ParametrizedLinear"),
    ],
)
def test_a_module_that_was_rebuilt_is_refused(change: Callable[[nn.Module], None], what: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    apply, params, buffers = from_module(module)
    change(module)
    with pytest.raises(ArgumentError, match=what) as caught:
        apply(params, buffers, torch.ones(1, 4))
    assert str(caught.value).endswith("Remedy: call from_module after the last change to the module.")
