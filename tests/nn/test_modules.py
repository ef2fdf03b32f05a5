"""`fdp.from_module` against the module itself: the same bits, called and traced, and nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from samples import some
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_modules import module_db

import fdp
from fdp.errors import ArgumentError
from fdp.nn.modules import from_module


def bits(tree: Any) -> list[Any]:
    """Everything in a tree that two equal programs must agree on; tensors as bytes."""
    return [
        (t.dtype, tuple(t.shape), t.detach().clone().contiguous().view(-1).numpy().tobytes())
        if isinstance(t, Tensor)
        else t
        for t in optree.tree_leaves(tree)
    ]


def held(module: nn.Module) -> tuple[Any, ...]:
    """Everything that a module holds: tensors by name, identity and bits, other attributes by identity."""
    parts = dict(module.named_modules(remove_duplicate=False))
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    attributes = [(name, k, id(v)) for name, part in parts.items() for k, v in vars(part).items()]
    return [(name, id(t), bits(t)) for name, t in tensors], attributes


def twice(call: Any, params: Any, buffers: Any, *args: Any, **kwargs: Any) -> list[Any]:
    torch.manual_seed(1)
    first = call(params, buffers, *args, **kwargs)
    return [first, call(params, first[1], *args, **kwargs)]


def check(module: nn.Module, *args: Any, traces: bool = True, **kwargs: Any) -> None:
    """Two calls in a row, as a pure function and as a module, give the same outputs and buffers."""
    apply, params, buffers = from_module(module)
    before, inputs = held(module), bits([params, buffers])
    results = twice(apply, params, buffers, *args, **kwargs)
    assert held(module) == before
    assert results[1][1].keys() == buffers.keys()
    if traces:

        def call(params: Any, buffers: Any, *args: Any) -> Any:
            return apply(params, buffers, *args, **kwargs)

        replay = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(params, buffers, *args)
        assert held(module) == before
        # A flat trace no longer knows which part the module ran without gradients, so it runs without; and so
        # does what it is compared with, because the LSTM kernel rounds differently when gradients are on.
        with torch.no_grad():
            assert bits(twice(replay, params, buffers, *args)) == bits(twice(call, params, buffers, *args))
    assert bits([params, buffers]) == inputs

    torch.manual_seed(1)
    for output, new in results:
        assert bits(module(*args, **kwargs)) == bits(output)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert bits({name: own[name] for name in new}) == bits(new)


class Tied(nn.Module):
    """An embedding that is also the last layer, as in language models; a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(6))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        return self.head(self.embedding(tokens) * self.inner.scale)


class Assigns(nn.Module):
    """Replaces its buffer instead of changing it, computes it from a parameter, and keeps notes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * self.weight * x.mean(0)
        self.last = x
        self.register_buffer("cache", x.detach())
        if x.shape[0] == 1:
            raise RuntimeError("one sample has no statistics")
        return x * self.weight + self.average


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(3, 3))


MODULES: dict[str, tuple[Any, Any]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        lambda: torch.randn(5, 3, 6, 6),
    ),
    "instance norm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), lambda: torch.randn(4, 3, 5)),
    "tied": (Tied, lambda: torch.randint(11, (4, 3))),
    "spectral norm": (spectral, lambda: torch.randn(4, 3)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 3)), lambda: torch.randn(4, 3)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), lambda: torch.randn(4, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()), lambda: torch.randn(4, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.5), lambda: torch.randn(5, 2, 3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_the_function_has_the_bits_of_the_module(name: str, training: bool) -> None:
    make, sample = MODULES[name]
    check(make().train(training), sample())


# They draw other random numbers than float32 needs, look at the values of their inputs, or are lazy.
UNTRACEABLE = ("GaussianNLLLoss", "CTCLoss")


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the modules themselves warn of
@pytest.mark.parametrize("info", some(module_db), ids=lambda info: info.name)
def test_every_module_of_torch(info: Any) -> None:
    for training in (True, False):
        cases = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=training)
        case = next((c for c in cases if c.forward_input is not None), None)
        if case is None or info.name.startswith("nn.FractionalMaxPool"):
            pytest.skip("no forward input for float32")
        module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs).train(training)
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            with pytest.raises(ArgumentError, match="whose shape is not known yet"):
                from_module(module)
            return
        args, kwargs = copy.deepcopy((case.forward_input.args, case.forward_input.kwargs))
        tensors = all(isinstance(a, Tensor) for a in optree.tree_leaves((args, kwargs)))
        check(module, *args, traces=tensors and info.module_cls.__name__ not in UNTRACEABLE, **kwargs)


def test_what_the_module_notes_in_itself_is_undone() -> None:
    module = Assigns()
    before = held(module)
    apply, params, buffers = from_module(module)
    x = torch.randn(4, 3)
    _, new = apply(params, buffers, x)
    make_fx(apply, tracing_mode="fake")(params, buffers, x)
    assert held(module) == before and not hasattr(module, "last")
    torch.testing.assert_close(new["average"], 0.1 * x.mean(0))
    assert not new["average"].requires_grad


def test_a_module_that_fails_is_restored() -> None:
    module = Assigns()
    before = held(module)
    apply, params, buffers = from_module(module)
    with pytest.raises(RuntimeError, match="one sample"):
        apply(params, buffers, torch.randn(1, 3))
    assert held(module) == before


def test_trainable_frozen_and_tied() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module[0].weight.requires_grad_(False)
    apply, params, buffers = from_module(module)
    assert sorted(params) == ["0.bias", "1.bias", "1.weight"]
    assert sorted(buffers) == ["0.weight", "1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert all(p.requires_grad for p in params.values())
    assert not any(b.requires_grad for b in buffers.values())
    own = {t.data_ptr() for t in [*module.parameters(), *module.buffers()]}
    assert own.isdisjoint(t.data_ptr() for t in [*params.values(), *buffers.values()])
    _, new = apply(params, buffers, torch.randn(5, 3))
    assert new["0.weight"] is buffers["0.weight"]
    assert new["1.running_mean"] is not buffers["1.running_mean"]

    _, params, buffers = from_module(Tied())
    assert sorted(params) == ["embedding.weight"] and sorted(buffers) == ["scale"]


def test_gradients_reach_parameters_through_ties_and_parametrizations() -> None:
    for module, x in [(Tied(), torch.randint(11, (4, 3))), (spectral(), torch.randn(4, 3))]:
        apply, params, buffers = from_module(module.eval())
        module.load_state_dict({**params, **buffers}, strict=False)
        names = list(params)
        buffers_for_module = {name: b.clone() for name, b in buffers.items()}
        grads = torch.autograd.grad(apply(params, buffers, x)[0].square().sum(), [params[n] for n in names])
        own = dict(module.named_parameters())
        expected = torch.autograd.grad(module(x).square().sum(), [own[n] for n in names])
        assert bits(grads) == bits(expected)
        assert bits(buffers) == bits(buffers_for_module)
        functional = torch.func.grad(lambda p: apply(p, buffers, x)[0].square().sum())(params)  # noqa: B023
        assert bits([functional[n] for n in names]) == bits(expected)


def test_the_mode_is_read_at_each_call() -> None:
    module = nn.Dropout()
    apply, params, buffers = from_module(module)
    x = torch.ones(100)
    assert not torch.equal(apply(params, buffers, x)[0], x)
    module.eval()
    assert torch.equal(apply(params, buffers, x)[0], x)


def compiled() -> Any:
    return torch.compile(nn.Linear(3, 4), backend="eager")


def compiled_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), torch.compile(nn.Linear(4, 4), backend="eager"))


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    module.compile(backend="eager")
    module[0].compile(backend="eager")
    return module


@pytest.mark.parametrize("make", [compiled, compiled_inside, compiled_in_place])
def test_compiled_modules_trace(make: Any) -> None:
    module = make()
    apply, params, buffers = from_module(module)
    before, x = held(module), torch.randn(2, 3)
    output, _ = apply(params, buffers, x)
    replay = make_fx(apply, tracing_mode="fake")(params, buffers, x)
    assert bits(replay(params, buffers, x)[0]) == bits(output)
    assert held(module) == before


class Wrapper(nn.parallel.DataParallel):
    pass


def hooked(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module.weight, register)(lambda grad: None)
    return module


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda: nn.Linear, "takes an nn.Module, not the class Linear", "pass an instance"),
        (lambda: lambda x: x, "takes an nn.Module, not a function", "pass an instance"),
        (lambda: nn.LazyLinear(3), "LazyLinear has tensors whose shape", "run one forward first"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "the module, a DataParallel", "pass module.module"),
        (lambda: Wrapper(nn.Linear(2, 2)), "the module, a DataParallel", "pass module.module"),
        (
            lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
            "the part '0' of Sequential, a DataParallel",
            "pass module.module",
        ),
        (lambda: hooked("register_hook"), "parameters with hooks, which copies do not have", "in the step"),
        (lambda: hooked("register_post_accumulate_grad_hook"), "parameters with hooks", "in the step"),
    ],
)
def test_refusals(make: Any, what: str, remedy: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        from_module(make())
    first, last = str(caught.value).split("\nRemedy: ")
    assert what in first and remedy in last


def test_a_lazy_module_works_after_one_forward() -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ArgumentError, match=r"\n  0\.weight\n  0\.bias\nRemedy: run one forward first"):
        from_module(module)
    module(torch.ones(1, 2))
    check(module, torch.randn(4, 2))


def test_distributed_wrappers_are_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    with pytest.raises(ArgumentError, match=r"a DistributedDataParallel, which averages(.|\n)*pass module\.module"):
        from_module(wrapper)


def test_apply_refuses_other_names_than_the_modules() -> None:
    apply, params, buffers = from_module(nn.BatchNorm1d(3))
    x = torch.randn(4, 3)
    with pytest.raises(ArgumentError, match=r"do not fit BatchNorm1d:\n  'bias' is missing\nRemedy: "):
        apply({"weight": params["weight"]}, buffers, x)
    with pytest.raises(ArgumentError, match=r"'gain' is not a name of the module"):
        apply({**params, "gain": x}, buffers, x)
    with pytest.raises(ArgumentError, match=r"'bias' is in both"):
        apply(params, {**buffers, "bias": params["bias"]}, x)
    moved = {**buffers, "bias": params["bias"].detach()}
    output, new = apply({"weight": params["weight"]}, moved, x)
    assert bits(output) == bits(apply(params, buffers, x)[0]) and new.keys() == moved.keys()


def test_an_embedding_that_shortens_its_weight() -> None:
    module = nn.Embedding(5, 3, max_norm=0.1)
    own = module.weight.detach().clone()
    apply, params, buffers = from_module(module)

    def gradient(params: Any, rows: Tensor) -> Any:
        return fdp.grad(lambda p: apply(p, buffers, rows)[0].sum())(params)

    with pytest.raises(fdp.PurityError, match="embedding_renorm_"):
        fdp.data_parallel(gradient)(params, torch.tensor([1, 3]))
    assert torch.equal(params["weight"], own)
    apply(params, buffers, torch.tensor([1, 3]))
    assert torch.equal(module.weight, own)  # what it was given is another tensor
    assert params["weight"].norm(dim=1)[[1, 3]].max() < 0.1001 < params["weight"].norm(dim=1)[[0, 2, 4]].min()
