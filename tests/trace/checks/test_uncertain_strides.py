"""Draws into values that lie otherwise than torch says: kernels are asked, or the step is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from eager_draws import Draws, assert_draws_like_eager
from samples import exhaustive
from torch._subclasses.fake_tensor import FakeTensorMode

import fdp
from fdp.trace.checks.uncertain_strides import AS_GIVEN
from fdp.trace.operators import kernel_strides
from fdp.trace.operators.fake_rules import add_fake_rules

OTHERWISE: dict[str, Draws] = {
    "copysign": lambda x: F.dropout(torch.copysign(torch.ones(x.shape), x), 0.5),
    "logsigmoid": lambda x: F.dropout(F.logsigmoid(x), 0.5),
    "2 ** x": lambda x: torch.rand_like(2.0**x),
    "poisson": lambda x: F.dropout(torch.poisson(x.abs()) + 1, 0.5),
    "in a condition": lambda x: torch.cond(
        x.sum() > 9**9, lambda y: y * 1, lambda y: torch.rand_like(y), (F.logsigmoid(x),)
    ),
}


@pytest.fixture
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is asked how it lays its results out, as if all values were too large for it."""
    monkeypatch.setattr(kernel_strides, "_MOST_ELEMENTS", -1)


@pytest.mark.parametrize("how", ["plain", pytest.param("compiled", marks=exhaustive)])
@pytest.mark.parametrize("name", [name for name in OTHERWISE if name != "poisson"])
def test_kernels_are_asked_how_they_lay_results_out(name: str, how: str) -> None:
    assert_draws_like_eager(OTHERWISE[name], torch.randn(6, 5).t(), how)


@pytest.mark.usefixtures("nothing_asked")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=exhaustive if how == "compiled" and name != "2 ** x" else ())
        for how in ("plain", "compiled")
        for name in OTHERWISE
    ],
)
def test_values_that_lie_otherwise_than_torch_says_are_refused(name: str, how: str) -> None:
    x = torch.randn(6, 5).t()
    with pytest.raises(fdp.TraceError, match="memory order differs from what torch predicts") as caught:
        assert_draws_like_eager(OTHERWISE[name], x, how)
    assert "strides" in str(caught.value) and "test_uncertain_strides.py" in str(caught.value)
    assert ".contiguous()" in str(caught.value)
    assert_draws_like_eager(lambda x: OTHERWISE[name](x.contiguous()), x, how)


@pytest.mark.usefixtures("nothing_asked")
def test_the_refusal_leaves_random_numbers_and_arguments_alone() -> None:
    x = torch.randn(6, 5).t()
    step = fdp.data_parallel(
        lambda w, x: (w.normal_(), OTHERWISE["logsigmoid"](x)), donate_argnums=0, check_trace=False,
        check_replication=False,
    )  # fmt: skip
    w, before = torch.ones(2), torch.random.get_rng_state()
    with pytest.raises(fdp.TraceError, match=r"aten\.log_sigmoid_forward"):
        step(w, x)
    assert torch.equal(before, torch.random.get_rng_state()) and torch.equal(w, torch.ones(2))


@pytest.mark.usefixtures("nothing_asked")
@pytest.mark.parametrize("how", ["plain", pytest.param("compiled", marks=exhaustive)])
def test_the_comparison_says_so_as_well(how: str) -> None:
    with pytest.raises(fdp.TraceError, match="memory order differs from what torch predicts"):
        assert_draws_like_eager(OTHERWISE["logsigmoid"], torch.randn(6, 5).t(), how, check_trace=True)


@pytest.mark.usefixtures("nothing_asked")
def test_microbatches_are_looked_at() -> None:
    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.logsigmoid((batch @ params["w"]).t()), 0.5).square().mean()

    def step(params: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=2)(params, batch)
        return {"w": params["w"] - grads["w"]}, fdp.pmean(loss)

    fitted = fdp.data_parallel(step, check_trace=False)
    with pytest.raises(fdp.TraceError, match="memory order differs from what torch predicts"):
        fitted({"w": torch.randn(4, 5)}, torch.randn(6, 4))


def test_ordinary_models_need_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from fdp.compare import strides

    monkeypatch.setattr(strides, "Replay", None)
    attention = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    apply, params, _ = fdp.from_module(attention)

    def step(params: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: apply(p, {}, batch)[0].square().mean())(params)
        return optree.tree_map(lambda p, g: p - g, params, grads), fdp.pmean(loss)

    fdp.data_parallel(step, check_trace=False)(params, torch.randn(3, 5, 16))


def some(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(size) * 0.8 + 0.1).to(dtype)


def lying(size: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    count = len(size)
    yield some(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    for order in itertools.permutations(range(count)):
        back = sorted(range(count), key=order.__getitem__)
        yield some(*(size[at] for at in order), dtype=dtype).permute(back)
    yield some(*size[:-1], 2 * size[-1], dtype=dtype)[..., ::2]
    yield some(*size[:-1], 1, dtype=dtype).expand(size)
    yield some(1, *size[1:], dtype=dtype).expand(size)


GIVEN: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "full_like": lambda x: (x, 2.0), "native_dropout": lambda x: (x, 0.5, True), "clamp": lambda x: (x, 0.0, 1.0),
    "where": lambda x: (x > 0.5, x, x), "bernoulli.p": lambda x: (x, 0.5), "pow": lambda x: (x, 2.0),
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=exhaustive) for d in (torch.float64, torch.bfloat16))], ids=str
)
@pytest.mark.parametrize("operator", sorted(AS_GIVEN, key=str), ids=str)
def test_operators_that_are_trusted_lie_as_their_rules_say(operator: Any, dtype: torch.dtype) -> None:
    name = str(operator).removeprefix("aten.").removesuffix(".default")
    binary = name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
    scalar = name in ("add.Scalar", "mul.Scalar", "div.Scalar")
    mode = FakeTensorMode()
    add_fake_rules(mode)
    for size in ((3, 4), (2, 3, 4)):
        for x in lying(size, dtype):
            given = GIVEN.get(name, GIVEN.get(name.split(".")[0], lambda x: (x,)))(x)
            calls = [(x, x), (x, 2.0), (x, torch.tensor(2.0))] if binary else [(x, 2.0)] if scalar else [given]
            for call in calls:
                fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in call]
                with mode:
                    said = operator(*fakes)
                for one, two in zip(optree.tree_leaves(operator(*call)), optree.tree_leaves(said), strict=True):
                    assert one.stride() == two.stride(), (call[0].stride(), one.stride(), two.stride())
