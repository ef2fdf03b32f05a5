"""Operators that refuse values, or are called for what they do and not for a result, do so at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import exhaustive, some

import fdp


@torch.library.custom_op("fdp_tests::look_at", mutates_args=())
def look_at(x: torch.Tensor) -> None:
    """An operator without a result: a log."""
    SEEN.append(float(x.sum()))


@look_at.register_fake
def _(x: torch.Tensor) -> None:
    return None


SEEN: list[float] = []


def factorised(w: torch.Tensor, b: torch.Tensor) -> Any:
    return w * 0.5, fdp.pmean(torch.linalg.cholesky(b).sum())


def inverted(w: torch.Tensor, b: torch.Tensor) -> Any:
    return w * 0.5, fdp.pmean(torch.linalg.inv(b).sum())


def asserted(w: torch.Tensor, b: torch.Tensor) -> Any:
    torch._assert_async((b >= 0).all())
    return w * 0.5, fdp.pmean(b.sum())


def asserted_in_a_loop(w: torch.Tensor, b: torch.Tensor) -> Any:
    def loss(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch._assert_async((b >= 0).all())
        return (w * b).sum()

    return w - fdp.accumulate(fdp.grad(loss), microbatches=2)(w, b), 0


REFUSING = [
    (factorised, -torch.eye(2)),
    (inverted, torch.zeros(2, 2)),
    (asserted, -torch.eye(2)),
    (asserted_in_a_loop, -torch.eye(2)),
]


@pytest.mark.parametrize(
    ("step", "bad", "compile"),
    [
        pytest.param(
            step, bad, compile, id=f"{step.__name__}-bad{at}-{compile}",
            marks=exhaustive if (compile and step is not asserted) or step is inverted else (),
        )
        for compile in (False, True)
        for at, (step, bad) in enumerate(REFUSING)
    ],
)  # fmt: skip
def test_what_an_operator_refuses_it_refuses_at_every_call(step: Any, bad: torch.Tensor, compile: bool) -> None:
    """Checks have no result that anything reads."""
    run = fdp.data_parallel(step, compile=compile)
    for _ in range(3):
        run(torch.ones(2), torch.eye(2))
    with pytest.raises(RuntimeError):
        step(torch.ones(2), bad)
    with pytest.raises(RuntimeError):
        run(torch.ones(2), bad)
    run(torch.ones(2), torch.eye(2))


@pytest.mark.parametrize("compile", some([False, True]))
def test_an_operator_without_a_result_runs_at_every_call(compile: bool) -> None:
    @fdp.data_parallel(compile=compile)
    def step(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.ops.fdp_tests.look_at(b)
        return w + fdp.pmean(b.sum())

    step(torch.ones(2), torch.ones(2))
    for number in range(4, 7):  # not compared again
        SEEN.clear()
        for _ in range(2):
            step(torch.ones(2), torch.full((2,), float(number)))
        assert SEEN[-1] == 2.0 * number and len(SEEN) >= 2


def ranged(w: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.profiler.record_function("forward"):
        y = torch.cond(w.sum() > 0, ranged_branch, lambda w: w * 3, (w,))
    return y, fdp.pmean(b.sum())


def ranged_branch(w: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("branch"):
        return w * 2


def optimizer_inside(w: torch.Tensor, b: torch.Tensor) -> Any:
    v = w.clone().requires_grad_()
    optimizer = torch.optim.SGD([v], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (fdp.pmean(b).sum() * v).square().sum().backward()
        optimizer.step()
    return v.detach(), fdp.pmean(b.sum())


@pytest.mark.parametrize("step", [ranged, optimizer_inside])
@pytest.mark.parametrize("compile", some([False, True]))
def test_ranges_of_a_profiler_are_left_out(step: Any, compile: bool) -> None:
    """Every optimizer of torch opens one."""
    w, b = torch.tensor([0.25, 0.5]), torch.tensor([0.5, 0.25])
    expected = step(w, b)
    trained = fdp.data_parallel(step, compile=compile)
    for _ in range(2):
        for one, two in zip(trained(w, b), expected, strict=True):
            assert torch.allclose(one, two)
    assert "profiler" not in str(trained.trace(w, b))
