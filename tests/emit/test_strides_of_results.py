"""Results lie in memory as plain PyTorch leaves them: gaps, orders, elements that are repeated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from samples import exhaustive

import fdp
from fdp.emit.memory.elements import has_gaps, with_strides


def test_a_result_with_gaps_keeps_them() -> None:
    """Leaves of donated state that share memory come back apart, each with its strides: `contiguous` copies it."""

    def step(state: dict[str, torch.Tensor], _: torch.Tensor) -> Any:
        copied = state["a"].contiguous()
        torch._foreach_mul_([copied], 0.5)
        return {"a": state["a"], "b": state["b"]}

    a = torch.arange(32.0).view(4, 8)[:, ::2]
    expected, state = a.clone(), {"a": a, "b": a.detach()}
    run = fdp.data_parallel(step, donate_argnums=0)
    for _ in range(3):
        state = run(state, torch.ones(2))
        for leaf in state.values():
            assert leaf.stride() == (8, 2) and torch.equal(leaf, expected)
    assert state["a"].data_ptr() != state["b"].data_ptr()


@pytest.mark.parametrize(
    ("value", "gaps"),
    [
        (torch.ones(4, 4), False), (torch.ones(4, 4).t(), False), (torch.ones(4, 8)[:, ::2], True),
        (torch.ones(4, 8)[:, :5], True), (torch.ones(1).expand(4), False), (torch.ones(6).unfold(0, 3, 2), False),
        (torch.ones(0, 3), False), (torch.ones(8)[::3], True), (torch.ones(4, 1, 8)[::2].permute(2, 1, 0), True),
    ],
)  # fmt: skip
def test_gaps_are_seen(value: torch.Tensor, gaps: bool) -> None:
    assert has_gaps(value) is gaps


def turned(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """At every call, state that lies otherwise: `contiguous` copies it at every other call."""
    copied = state["a"].contiguous()
    copied.mul_(0.5)
    return {"a": (state["a"] + 1).t().clone()}


def spread(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """State that is one element, four times; and the same state under several names."""
    own = state["a"].contiguous() + 1
    return {"a": own[:1].expand(4), "b": state["a"], "c": own[::2], "d": own.view(2, 2).t()}


def halved(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """State with gaps becomes dense as `.data = ` gives it other memory."""
    state["a"].data = state["a"].data * 0.5
    state["a"].contiguous().mul_(4)
    return {"a": state["a"]}


def windows(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    return {"a": state["a"], "b": state["a"][:2]}


STEPS = [
    (turned, torch.arange(9.0).view(3, 3)),
    (spread, torch.arange(4.0)),
    (windows, torch.arange(6.0).unfold(0, 3, 1)),
    (halved, torch.arange(32.0).view(8, 4)[::2]),
]


@pytest.mark.parametrize(
    ("step", "first", "compile"),
    [
        pytest.param(step, first, compile, marks=exhaustive if compile and step is not windows else ())
        for step, first in STEPS
        for compile in (False, True)
    ],
    ids=[f"{step.__name__}-first{at}-{compile}" for at, (step, _) in enumerate(STEPS) for compile in (False, True)],
)
def test_results_lie_in_memory_as_plain_pytorch_leaves_them(compile: bool, step: Any, first: torch.Tensor) -> None:
    """What asks how its state lies (`contiguous`, `reshape`) gets a copy at one call, the state itself at another."""
    run = fdp.data_parallel(step, donate_argnums=0, compile=compile)
    expected, state = (
        {"a": with_strides(first, first.stride(), anew=True)},
        {"a": with_strides(first, first.stride(), anew=True)},
    )
    for _ in range(4):
        expected, state = step(expected, None), run(state, torch.ones(2))
        for name, leaf in expected.items():
            assert state[name].stride() == leaf.stride(), name
            assert torch.equal(state[name], leaf), name
        expected, state = {"a": expected["a"]}, {"a": state["a"]}


@pytest.mark.parametrize("microbatches", [0, 4])
@pytest.mark.parametrize(
    "param",
    [
        torch.ones(4, 8)[:, ::2].t(),
        torch.ones(4, 4).t(),
        torch.ones(8, 4)[::2],
        torch.ones(2, 3, 4).permute(2, 0, 1)[::2],
    ],
)
def test_gradients_lie_in_the_order_of_their_parameters(param: torch.Tensor, microbatches: int) -> None:
    """Without gaps, as `torch.empty_like` has it, whether the parameter has some or not; also one that is zero."""

    def step(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        def loss(params: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
            return (params["used"].contiguous() * batch.sum()).sum()

        grad = fdp.grad(loss)
        return (fdp.accumulate(grad, microbatches=microbatches) if microbatches else grad)(params, batch)

    found = fdp.data_parallel(step)({"used": param, "unused": param}, torch.ones(4))
    for grad in found.values():
        assert grad.stride() == torch.empty_like(param).stride()


@pytest.mark.parametrize("size", [(), (4,), (3, 4), (1, 5), (2, 3, 4), (0, 3)])
def test_tensors_are_laid_out(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value = torch.randn(size)
    for stride in itertools.product([0, 1, 2, 3, 5, 12], repeat=len(size)):
        # Elements that are to lie in one place have to be equal.
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if value.numel() else 0
        given = torch.randn(reach).as_strided(size, stride).clone()
        found = with_strides(given, stride)
        assert torch.equal(found, given)
        assert all(n == 1 or s == t for n, s, t in zip(size, stride, found.stride(), strict=True))
        anew = with_strides(given, stride, anew=True)
        assert torch.equal(anew, given) and (anew.data_ptr() != given.data_ptr() or not given.numel())


def test_the_mean_of_one_rank_over_a_dimension_of_one_element() -> None:
    """It is the value itself, but lies in another way: no operator may write where it reads the other."""

    def step(b: torch.Tensor) -> torch.Tensor:
        mean = fdp.pmean(b.mT.clone())
        return 0.5 * mean + 0.25 * mean

    b = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert b.mT.clone().stride() == (1, 1)
    assert torch.equal(fdp.data_parallel(step)(b), 0.75 * b.mT)
