"""`from_torch` of classes that are not torch's: exact, or refused with what they keep where a pure update loses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import lion_pytorch
import pytest
import ranks
import torch
from bits import same_leaves
from optimizer_classes import by_fdp, by_hand, sample
from torch import Tensor
from torch.distributed.tensor import DTensor

import fdp
from fdp.errors import ArgumentError
from fdp.optim import from_torch

Move = Callable[[Any, dict[str, Any], Tensor, dict[str, Any]], None]


def class_of(move: Move, base: type = torch.optim.Optimizer) -> type:
    """A class whose step calls `move(instance, group, parameter, state)` for each parameter."""

    class Written(base):  # type: ignore[misc, valid-type]
        seen: ClassVar[list[int]] = [0]

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            if base is torch.optim.Optimizer:
                super().__init__(params, {"lr": lr})
            else:
                super().__init__(params, lr=lr)
            self.count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        move(self, group, p, self.state[p])

    return Written


def momentum(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if len(state) == 0:
        state["momentum"] = torch.zeros_like(p)
        state.setdefault("began", torch.full_like(p, 2.0))
    state["momentum"].mul_(0.9).add_(p.grad)
    p.sub_(group["lr"] * state["began"] * state["momentum"])


def average(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if "z" not in state:
        state.update(z=p.clone(), steps=torch.zeros(()))
    state["steps"] = state["steps"] + 1
    state["z"] = state["z"] - group["lr"] * p.grad
    p.lerp_(state["z"], 1 / state["steps"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cls", [class_of(momentum), class_of(average), lion_pytorch.Lion], ids=["momentum", "average", "Lion"]
)
def test_a_class_that_makes_its_state_in_its_first_step_has_its_own_bits(cls: type, dtype: torch.dtype) -> None:
    params, data = sample(dtype)
    expected = by_hand(cls, params, data, {})
    for traced in (False, True):
        assert same_leaves(by_fdp(from_torch(cls), params, data, traced), expected), f"{traced=}"


def test_a_state_that_is_made_draws_none_of_the_numbers_of_the_run() -> None:
    before = torch.get_rng_state()
    from_torch(class_of(momentum)).init({"w": torch.ones(3)})
    assert torch.equal(torch.get_rng_state(), before)


def count_in_group(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    group["k"] = group.get("k", 0) + 1
    p.sub_(group["lr"] * group["k"] * p.grad)


def count_on_self(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    self.count += 1
    p.sub_(group["lr"] * self.count * p.grad)


def count_in_a_list(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    self.seen[0] += 1
    p.sub_(group["lr"] * self.seen[0] * p.grad)


def tensor_on_self(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    self.total = getattr(self, "total", torch.zeros(())) + 1
    p.sub_(group["lr"] * self.total * p.grad)


def count_in_state_of_no_parameter(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    shared = self.state["shared"]
    shared["k"] = shared.get("k", 0) + 1
    p.sub_(group["lr"] * shared["k"] * p.grad)


@pytest.mark.parametrize("base", [torch.optim.Optimizer, torch.optim.SGD], ids=lambda base: base.__name__)
@pytest.mark.parametrize(
    ("move", "where"),
    [
        (count_in_group, r"group\['k'\]"), (count_on_self, r"self\.count"), (count_in_a_list, r"self\.seen"),
        (tensor_on_self, r"self\.total"), (count_in_state_of_no_parameter, r"state\['shared'\]"),
    ],
    ids=["group", "self", "list", "tensor", "state"],
)  # fmt: skip
def test_a_count_that_an_update_would_lose_is_refused(move: Move, where: str, base: type) -> None:
    optimizer = from_torch(class_of(move, base), lr=0.5)
    w = torch.ones(2)
    with pytest.raises(ArgumentError, match=rf"changes {where}(.|\n)*\nRemedy: write it as a transformation"):
        optimizer.update(torch.ones(2), optimizer.init(w), w)


def from_the_gradient(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if len(state) == 0:
        state["last"] = p.grad.clone()
    p.sub_(group["lr"] * (p.grad + state["last"]))


def first_differs(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    if len(state) == 0:
        state["momentum"] = torch.zeros_like(p)
        return
    p.sub_(group["lr"] * p.grad)


def counts_in_python(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("step", 0)
    state["step"] += 1
    p.sub_(group["lr"] / state["step"] * p.grad)


def raises(self: Any, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    raise LookupError("call train() first")


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (from_the_gradient, r"starts with the first gradient \('last'\)"),
        (first_differs, "its first step is not a step from the state"),
        (counts_in_python, "keeps 'step' of params as"),
        (raises, r"a first step of Written raises (.|\n)*LookupError: call train\(\) first"),
    ],
    ids=["gradient", "first", "number", "raises"],
)
def test_a_class_without_a_first_state_is_refused(move: Move, why: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{why}(.|\n)*\nRemedy: "):
        from_torch(class_of(move)).init(torch.ones(2))


def test_a_class_without_a_step_is_refused() -> None:
    class Bare(torch.optim.Optimizer):
        pass

    with pytest.raises(ArgumentError, match=r"Bare has no step(.|\n)*\nRemedy: write it as a transformation"):
        from_torch(Bare)


def test_a_step_with_such_a_class() -> None:
    optimizer = from_torch(lion_pytorch.Lion, lr=0.1, weight_decay=0.1)

    @fdp.data_parallel(donate_argnums=0, batch_argnums=())
    def step(state: Any, grad: Tensor) -> Any:
        w, opt = optimizer.update(fdp.pmean(grad), state["opt"], state["w"])
        return {"w": w, "opt": opt}

    w = torch.tensor([1.0, -2.0])
    by_class = torch.nn.Parameter(w.clone())
    oracle = lion_pytorch.Lion([by_class], lr=0.1, weight_decay=0.1)
    state = {"w": w.clone(), "opt": optimizer.init(w)}
    for number in range(5):
        grad = torch.tensor([1.0, -1.0]) * (number - 2)
        by_class.grad = grad
        oracle.step()
        state = step(state, grad)
        assert torch.equal(state["w"], by_class.detach())


def trains_on_parts() -> tuple[bool, list[bool]]:
    optimizer = from_torch(lion_pytorch.Lion, lr=0.1)

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Any, batch: Tensor) -> Any:
        grads = fdp.grad(lambda p: (p["w"] * batch).sum() ** 2 + p["b"].square().sum())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    found = []
    for place in (fdp.replicate, lambda params: fdp.shard(params, min_size=1)):
        params = place({"w": torch.linspace(-1, 1, 24).reshape(6, 4), "b": torch.ones(3)})
        state = {"params": params, "opt": optimizer.init(params)}
        for call in range(3):
            state = step(state, torch.full((6, 4), 0.1 * (call + 1)))
        found.append(fdp.unshard(state["params"]))
    one, two = found
    return isinstance(state["opt"]["state"]["w"]["exp_avg"], DTensor), [
        torch.equal(one[name], two[name]) for name in one
    ]


def test_state_of_sharded_parameters_is_sharded_and_trains_as_the_whole() -> None:
    assert ranks.run(2, trains_on_parts) == [(True, [True, True])] * 2


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_classes_of_schedulefree_are_refused_with_the_way_out(name: str) -> None:
    """They keep a mode and a count in a group, so that an update is no function of its arguments."""
    schedulefree = pytest.importorskip("schedulefree")
    optimizer = from_torch(getattr(schedulefree, name), lr=0.1)
    params = {"w": torch.ones(3)}
    with pytest.raises(fdp.ArgumentError, match=rf"(?s){name}.*Remedy: write it as a transformation"):
        optimizer.update(params, optimizer.init(params), params)
