"""Conditions, loops and numbers that depend on values of tensors are decided anew at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fdp

Tree = Any


def test_a_condition_is_decided_anew_at_every_call() -> None:
    def step(w: Tree, b: Tree) -> Tree:
        mean = fdp.pmean(b)
        chosen = torch.cond(mean.sum() > 0, lambda x: x + 1, lambda x: x - 1, (w,))
        closed = torch.cond(mean.sum() > 0, lambda: w * mean, lambda: w - mean, ())
        grad = fdp.grad(lambda p: torch.cond(b.sum() > 0, lambda x: (x * x).sum(), lambda x: (3 * x).sum(), (p,)))(w)
        return chosen, closed, grad

    transform = fdp.data_parallel(step)
    w = torch.full((2,), 2.0)
    for sign in (1.0, -1.0, 1.0):
        chosen, closed, grad = transform(w, torch.full((2,), 5.0 * sign))
        assert chosen.tolist() == [2.0 + sign] * 2
        assert closed.tolist() == [10.0 if sign > 0 else 7.0] * 2
        assert grad.tolist() == [4.0 if sign > 0 else 3.0] * 2
    assert transform.traces == 1


def test_a_loop_runs_as_often_as_values_say() -> None:
    from torch._higher_order_ops import while_loop

    def step(w: Tree, b: Tree) -> Tree:
        most = fdp.pmean(b).sum()
        return while_loop(lambda i, x: i < most, lambda i, x: (i + 1, x * 2), (torch.zeros(()), w))[1]

    transform = fdp.data_parallel(step)
    assert [transform(torch.ones(1), torch.full((1,), k)).item() for k in (1.0, 3.0, 0.0)] == [2.0, 8.0, 1.0]


NUMBERS = {
    "a factor": lambda w, n: w * n,
    "arithmetic": lambda w, n: w * (1 - 2 * n) / (n**2 + 3),
    "in place": lambda w, n: w.clone().mul_(n).add_(1, alpha=n),
    "a bound": lambda w, n: torch.clamp(w, max=n),
    "a value to fill with": lambda w, n: torch.full_like(w, n),
}


@pytest.mark.parametrize("name", list(NUMBERS))
def test_numbers_read_from_tensors_are_read_at_every_call(name: str) -> None:
    def step(w: Tree, b: Tree) -> Tree:
        return NUMBERS[name](w, fdp.pmean(b).sum().item())

    transform = fdp.data_parallel(step)
    w = torch.tensor([1.0, 5.0])
    for k in (1.0, 2.0, -3.0):
        torch.testing.assert_close(transform(w, torch.full((2,), k)), step(w, torch.full((2,), k)))
    assert transform.traces == 1
