"""What models of libraries do, and a plain training loop does not mind: each on its own, against the module itself."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from samples import exhaustive, some
from torch import nn

import fdp


def same_as_by_hand(module: nn.Module, *inputs: torch.Tensor, check_trace: bool = True) -> None:
    """Two calls of a step with a module in it, against the module under plain autograd."""
    apply, params, buffers = fdp.from_module(module)

    @fdp.data_parallel(check_trace=check_trace)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            output, new = apply(params, buffers, batch)
            return (output * output.detach().cos()).sum(), (output, new)

        (_, aux), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state)
        return grads, fdp.per_rank(aux)

    for x in inputs:
        plain = copy.deepcopy(module)
        expected = plain(x)
        (expected * expected.detach().cos()).sum().backward()
        grads, (output, new) = step(params, x)
        torch.testing.assert_close(output, expected.detach())
        torch.testing.assert_close(grads, {name: p.grad for name, p in plain.named_parameters()})
        torch.testing.assert_close({name: new[name] for name in buffers}, dict(plain.named_buffers()))


class NormalisedRows(nn.Module):
    """Batch normalisation over the last dimension, as models of sequences have it; then a view of the result."""

    def __init__(self, kind: Any, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.dims = kind(6), dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        result: torch.Tensor = self.norm(x.permute(self.dims) * 1.0).permute(back)
        return result.reshape(-1, result.shape[-1]) if result.shape[-1] == 6 else result.flatten(1)


NORMS = [
    (nn.BatchNorm1d, (0, 2, 1), (4, 5, 6)),
    (nn.BatchNorm1d, (1, 2, 0), (5, 4, 6)),
    (nn.BatchNorm1d, (1, 0), (6, 5)),
    (nn.BatchNorm2d, (0, 3, 1, 2), (4, 2, 3, 6)),
    (nn.BatchNorm2d, (1, 0, 3, 2), (6, 4, 3, 2)),
    (nn.BatchNorm3d, (0, 4, 1, 2, 3), (4, 2, 3, 2, 6)),
    (nn.BatchNorm3d, (1, 0, 2, 4, 3), (6, 4, 3, 2, 2)),
]


@pytest.mark.parametrize("check_trace", some([True, False]))
@pytest.mark.parametrize(("kind", "dims", "shape"), some(NORMS), ids=[f"{k.__name__} {d}" for k, d, _ in NORMS])
def test_batch_normalisation_of_what_is_not_contiguous(kind: Any, dims: Any, shape: Any, check_trace: bool) -> None:
    torch.manual_seed(0)
    module = NormalisedRows(kind, dims)
    same_as_by_hand(module, *(torch.randn(shape) + 3 for _ in range(3)), check_trace=check_trace)


@pytest.mark.parametrize("affine", some([True, False]))
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("narrow", some([torch.bfloat16, torch.float16]))
def test_batch_normalisation_under_autocast(affine: bool, tracked: bool, narrow: torch.dtype) -> None:
    """Its input is narrow, and its parameters and statistics are not."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, affine=affine, track_running_stats=tracked)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 2))
    apply, params, buffers = fdp.from_module(module)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    @fdp.data_parallel
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            with torch.autocast("cpu", narrow):
                output, new = apply(params, buffers, batch)
            return loss_of(output), new

        (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state)
        return grads, fdp.per_rank((loss, new))

    for _ in range(2):
        x, plain = torch.randn(4, 3, 6, 6), copy.deepcopy(module)
        with torch.autocast("cpu", narrow):
            expected = loss_of(plain(x))
        expected.backward()
        grads, (loss, new) = step(params, x)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(new, dict(plain.named_buffers()))
        torch.testing.assert_close(grads, {name: p.grad for name, p in plain.named_parameters()}, rtol=2e-2, atol=1e-3)


class Sorted(nn.Module):
    """Rows into an order and back, by an inverse permutation that is written into memory without a value."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(3, 3), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        numbers = torch.arange(len(order))
        inverse = torch.empty_like(order)
        if self.way == "index":
            inverse[order] = numbers
        elif self.way == "scatter":
            inverse.scatter_(0, order, numbers)
        elif self.way == "copy":
            inverse.index_copy_(0, order, numbers)
        else:
            late = order.argsort() >= 2
            inverse.masked_fill_(late, 0).masked_fill_(~late, 1)
        result: torch.Tensor = self.linear(x[order]).cumsum(0)[inverse]
        return result


@pytest.mark.parametrize("way", ["index", "scatter", "copy", "mask"])
def test_memory_that_is_filled_by_an_index(way: str) -> None:
    same_as_by_hand(Sorted(way), torch.randn(5, 3), torch.randn(5, 3))


@pytest.mark.parametrize(
    "fill",
    [
        lambda x, i: x,
        lambda x, i: x.index_put_((i,), torch.ones(2), accumulate=True),
        lambda x, i: x.scatter_(0, i, torch.ones(2), reduce="add"),
        lambda x, i: x.index_add_(0, i, torch.ones(2)),
        lambda x, i: x.index_put_((i,), x.clone()),
    ],
)
def test_memory_that_is_read_before_it_is_filled(fill: Any) -> None:
    @fdp.data_parallel
    def step(w: Any, batch: Any) -> Any:
        return fdp.pmean(fill(torch.empty(2), batch) * w)

    with pytest.raises(fdp.TraceError, match="reads uninitialised memory"):
        step(torch.ones(2), torch.tensor([0, 1]))


def looked_at_for_its_shape(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    unset = torch.empty(2, 3)
    like = [
        torch.rand_like(unset),
        torch.randn_like(unset),
        torch.randint_like(unset, 5),
        torch.randint_like(unset, 2, 5),
    ]
    like += [torch.zeros_like(unset), torch.ones_like(unset), torch.full_like(unset, 2.0), torch.fill(unset, 3.0)]
    like += [unset.new_zeros(2, 3), unset.new_ones(2, 3), unset.new_full((2, 3), 4.0), torch.fill(unset, batch.sum())]
    return w + fdp.pmean(torch.stack(like).sum((0, 1)) * batch)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)])
def test_memory_that_is_looked_at_for_its_shape_alone(compiled: bool) -> None:
    step = fdp.data_parallel(looked_at_for_its_shape, compile=compiled)
    for seed in range(2):
        w, batch = torch.ones(3), torch.randn(3)
        torch.manual_seed(seed)
        found = step(w, batch)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, looked_at_for_its_shape(w, batch))


def test_memory_that_is_looked_at_for_its_shape_and_read() -> None:
    @fdp.data_parallel
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        unset = torch.empty(())
        return w + fdp.pmean(torch.fill(unset, unset) * batch)

    with pytest.raises(fdp.TraceError, match="reads uninitialised memory"):
        step(torch.ones(3), torch.ones(3))


class Converting(nn.Module):
    """A router that computes in float32 whatever the model does, and says so at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        result: torch.Tensor = self.inner(x) * self.router(x.float()).to(x.dtype).softmax(-1)
        return result


def test_a_part_that_is_converted_in_the_forward() -> None:
    same_as_by_hand(Converting(), torch.randn(4, 3), torch.randn(4, 3))


def test_a_part_that_is_converted_to_another_type() -> None:
    module = Converting().bfloat16()
    apply, params, buffers = fdp.from_module(module)

    @fdp.data_parallel
    def step(state: Any, batch: Any) -> Any:
        return fdp.grad(lambda p: apply(p, buffers, batch)[0].float().sum())(state)

    x = torch.randn(4, 3).bfloat16()
    grads = step(params, x)
    # By hand: the router's tensors, converted as a part of the function.
    inner, (linear, norm) = module.inner, module.router
    wide = [p.detach().clone().requires_grad_() for p in (linear.weight, linear.bias, norm.weight, norm.bias)]
    a, b, c, d = (p.float() for p in wide)
    routed = nn.functional.batch_norm(nn.functional.linear(x.float(), a, b), None, None, c, d, training=True)
    (inner(x) * routed.bfloat16().softmax(-1)).float().sum().backward()
    names = ["router.0.weight", "router.0.bias", "router.1.weight", "router.1.bias"]
    torch.testing.assert_close([grads[name] for name in names], [p.grad for p in wide])
    assert module.router[0].weight.dtype is torch.bfloat16  # the original is as it was


class Hooked(nn.Module):
    """Registers a hook at its first call, and notes things in a list, a dict, a set and a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hooked = False
        self.seen: list[Any] = []
        self.notes: dict[str, Any] = {"first": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.hooked = True
        self.seen.append(x)
        self.notes["last"] = x
        result: torch.Tensor = self.linear(x) * len(self.seen) * len(self.notes)
        return result


def test_what_a_module_notes_goes_with_the_call() -> None:
    module = Hooked()
    apply, params, buffers = fdp.from_module(module)
    x = torch.randn(2, 3)
    expected = copy.deepcopy(module)(x)
    for _ in range(3):
        torch.testing.assert_close(apply(params, buffers, x)[0], expected)
    step = fdp.data_parallel(lambda state, batch: fdp.per_rank(apply(state, buffers, batch)[0]))
    for _ in range(2):
        torch.testing.assert_close(step(params, x), expected.detach())
    assert (module.seen, module.notes, module.hooked, len(module.linear._forward_hooks)) == ([], {"first": 1}, False, 0)


@pytest.mark.parametrize("where", ["inside", "outside, seeded inside"])
def test_a_generator_that_each_call_starts_anew(where: str) -> None:
    """The trace would hold it, and go on with it: right at the first call, and wrong from then on."""
    outer = torch.Generator()

    @fdp.data_parallel
    def step(w: Any, batch: Any) -> Any:
        generator = (torch.Generator() if where == "inside" else outer).manual_seed(5)
        return fdp.per_rank(torch.randn(2, generator=generator) * w)

    with pytest.raises(fdp.TraceError) as caught:
        step(torch.ones(2), torch.ones(2))
    first, line, remedy = str(caught.value).splitlines()
    assert first.startswith("step 'step' makes a torch.Generator or seeds one:")
    assert line.startswith("  aten.randn.generator at test_model_habits.py:")
    assert remedy.startswith("Remedy: make the generator outside of the step")


def test_a_generator_that_goes_on() -> None:
    outer, twin = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    step = fdp.data_parallel(lambda w, batch: fdp.per_rank(torch.randn(2, generator=outer) * w))
    for _ in range(3):
        assert torch.equal(step(torch.ones(2), torch.ones(2)), torch.randn(2, generator=twin))


def test_an_assertion_about_values_is_named() -> None:
    @fdp.data_parallel
    def step(w: Any, batch: Any) -> Any:
        assert (batch > 0).all(), "positive"
        return fdp.pmean(batch.sum() * w)

    with pytest.raises(fdp.TraceError) as caught:
        step(torch.ones(()), torch.ones(2))
    first, line, remedy = str(caught.value).splitlines()
    assert first == "step 'step' asserts something about the value of a tensor, which a traced step does not have."
    assert line.startswith("  test_model_habits.py:")
    assert line.endswith(' in step: assert (batch > 0).all(), "positive"')
    assert remedy == "Remedy: check data before the step; an assertion in a library's code is left out by python -O."


def test_where_in_an_output_something_is_no_tensor() -> None:
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.per_rank({"a": torch.ones(1), "b": [object()]})
    assert str(caught.value).splitlines()[0] == "fdp.per_rank was given object at ['b'][0]."


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_constant_is_made_in_a_step(layout: str) -> None:
    def step(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * fdp.pmean(torch.sparse.mm(getattr(torch.eye(3), layout)(), b)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that these layouts are in beta
        run = fdp.data_parallel(step)
        for _ in range(2):
            torch.testing.assert_close(run(torch.ones(2), torch.ones(3, 2)), torch.full((2,), 0.4))


@pytest.mark.parametrize("owner", [torch, pytest.param(torch._VF, marks=exhaustive), torch.ops.aten])
def test_an_lstm_that_is_called_by_itself(owner: Any) -> None:
    layer = torch.nn.LSTM(3, 4)
    params = [param.detach() for param in layer.parameters()]

    def step(params: list[torch.Tensor], x: torch.Tensor) -> Any:
        def loss(params: list[torch.Tensor]) -> torch.Tensor:
            first = [torch.zeros(1, 2, 4)] * 2
            return owner.lstm(x, first, params, True, 1, 0.0, True, False, False)[0].square().sum()

        return fdp.pmean(fdp.grad(loss)(params))

    run, batch = fdp.data_parallel(step), torch.ones(5, 2, 3)
    if owner is torch.ops.aten:
        with pytest.raises(fdp.TraceError, match="oneDNN"):
            run(params, batch)
    else:
        torch.testing.assert_close(run(params, batch), step(params, batch))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_step_under_detect_anomaly_runs_and_says_what_looks_at_gradients() -> None:
    def step(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w - fdp.pmean(fdp.grad(lambda w: ((w * b) ** 2).mean())(w))

    run = fdp.data_parallel(step)
    with torch.autograd.detect_anomaly(check_nan=True):
        with pytest.warns(UserWarning, match=r"does not look into step 'step'(.|\n)*check_finite=True") as caught:
            first = run(torch.ones(2), torch.ones(2))
        assert [warning.filename for warning in caught] == [__file__]
        assert torch.is_anomaly_enabled() and torch.equal(run(torch.ones(2), torch.ones(2)), first)
    assert torch.equal(first, torch.zeros(2))
