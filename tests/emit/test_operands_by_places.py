"""Operators that mean elements by their places in memory: what they look at lies in memory of its own.

Places are counted from where memory begins. In the memory of a step, in a bucket, and in state that begins late in its
memory, the same places are those of other values. Python for one rank is the reference: equal values have equal means.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from bits import same_bits
from fake_ranks import fake_group
from samples import ALL_SAMPLES, some
from torch import Tensor

import fdp
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.proved import verified_program

Step = Callable[[Tensor, Callable[[Tensor], Tensor]], Any]

LOOKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as_strided": lambda x, y: torch.as_strided(x, (2, 2), (1, 2), 1),
    "as_strided_copy": lambda x, y: torch.as_strided_copy(x, (2, 2), (1, 2), 1),
    "as_strided_copy, no place": lambda x, y: torch.as_strided_copy(x, (2, 2), (1, 2)),
    "as_strided_scatter": lambda x, y: torch.as_strided_scatter(x, y[:2, :2], (2, 2), (1, 2), 1)[:2, :2],
    "as_strided_scatter, no place": lambda x, y: torch.as_strided_scatter(x, y[:2, :2], (2, 2), (1, 2))[:2, :2],
    "twice": lambda x, y: LOOKS["as_strided_copy"](torch.as_strided_scatter(x, y[0, :2], (2,), (1,), 1), y),
    "in a branch": lambda x, y: torch.cond(
        y.sum() > -1e9, lambda x: torch.as_strided(x, (2, 2), (2, 1), 1) * 2, lambda x: x.contiguous()[:2, :2] * 3, (x,)
    ),
    "integers": lambda x, y: torch.as_strided_copy(x.view(torch.int32), (2, 2), (1, 2), 1).view(torch.float32),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x, "rows": lambda x: x[1:], "transposed": lambda x: x.t(), "columns": lambda x: x[:, 1:],
}  # fmt: skip


def step_of(look: str, view: str, averaged: bool) -> Step:
    """One of two values, which share a memory of the step, or a bucket, is looked at by places."""

    def step(b: Tensor, mean: Callable[[Tensor], Tensor]) -> Any:
        one, two = (b * 2).exp(), (b * 3).tanh()
        if averaged:
            one, two = mean(one), mean(two)
        found = LOOKS[look](VIEWS[view](two), one) + one[:2, :2]
        return (found, two + one) if averaged else (mean(found), mean(two + one))

    return step


CASES = [(look, view, averaged) for look in LOOKS for view in VIEWS for averaged in (False, True)]


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def transformed(step: Step, **options: Any) -> fdp.Step:
    return fdp.data_parallel(lambda b: step(b, fdp.pmean), check_replication=False, **options)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("look", "view", "averaged"), some(CASES, 5))
def test_the_faster_program_is_right(look: str, view: str, averaged: bool, world: int) -> None:
    plan = transformed(step_of(look, view, averaged), group=fake_group(world)).plan(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verified_program(plan_memory(plan, world > 1), 0, world > 1)


def test_slices_that_overlap_around_what_is_unset() -> None:
    """What happened to be in memory is the same wherever that lies: it says nothing against a program."""

    def step(b: Tensor) -> Tensor:
        padded = b.new_empty(4, 6)
        padded[:, 1:5] = b * 2
        padded[:, :1] = padded[:, 4:5]
        padded[:, 5:] = padded[:, 1:2]
        return fdp.pmean(padded.sin())

    plan = fdp.data_parallel(step, group=fake_group(2)).plan(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verified_program(plan_memory(plan, True), 0, True)


def wrong_on_ranks() -> list[Any]:
    found = []
    for case in CASES if ALL_SAMPLES else CASES[::9]:
        if not same_bits(transformed(step_of(*case))(batch()), step_of(*case)(batch(), torch.clone)):
            found.append(case)
    return found


def test_two_ranks_compute_what_python_does() -> None:
    assert ranks.run(2, wrong_on_ranks, deadline_s=300) == [[], []]


LATE: dict[str, Callable[[Tensor], Any]] = {
    "a view of new state": lambda x: (y := x * 2, torch.as_strided(y, (2,), (1,), 1) + 1),
    "a copy of new state": lambda x: (y := x * 2, torch.as_strided_copy(y, (2,), (1,), 1)),
    "a view of a clone": lambda x: (y := x.clone().add_(1), torch.as_strided(y, (2,), (1,), 1) + 1),
    "into a clone": lambda x: (y := x.clone().add_(1), torch.as_strided_scatter(y, y[:2] * 0, (2,), (1,), 1)),
    "in a branch": lambda x: (
        y := x * 2,
        torch.cond(y.sum() > -1e9, lambda y: torch.as_strided(y, (2,), (1,), 1).clone(), lambda y: y[:2].clone(), (y,)),
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}])
def test_state_that_begins_late_in_its_memory(how: str, check: bool, options: Any) -> None:
    memory = torch.randn(20, generator=torch.Generator().manual_seed(2))
    expected = LATE[how](memory.clone()[4:12].clone())
    step = fdp.data_parallel(LATE[how], check_trace=check, check_replication=False, **options)
    assert same_bits(step(memory.clone()[4:12]), expected)


def of_a_part(x: Tensor) -> Any:
    return torch.as_strided(fdp.pmean((x * 2)[1:]), (2,), (1,), 1) + 0, fdp.pmean((x * 2).sum())


def test_what_one_rank_averages_begins_where_its_memory_does() -> None:
    x = torch.arange(16.0).view(4, 4)
    assert same_bits(fdp.data_parallel(of_a_part, check_trace=False)(x)[0], torch.tensor([10.0, 12.0]))


def in_a_microbatch(w: Tensor, x: Tensor) -> Any:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.as_strided_scatter(x * w, w[:2].detach(), (2,), (1,), 1).square().sum()

    return fdp.accumulate(fdp.value_and_grad(loss), 2)(w, x)


def given_to_a_microbatch(w: Tensor, x: Tensor) -> Any:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (torch.as_strided_copy(w, (2,), (1,), 1) * x.sum()).sum()

    return fdp.accumulate(fdp.value_and_grad(loss), 2)(w, x)


def test_values_of_a_microbatch_are_looked_at_by_places() -> None:
    w, x = torch.arange(4.0), torch.arange(16.0).view(4, 4)
    both = [
        torch.as_strided_scatter(each * w.requires_grad_(), w[:2].detach(), (2,), (1,), 1).square().sum()
        for each in x.split(2)
    ]
    grads = [torch.autograd.grad(each, w)[0] for each in both]
    loss, grad = fdp.data_parallel(in_a_microbatch, check_replication=False)(w.detach(), x)
    torch.testing.assert_close((loss, grad), (sum(both).detach() / 2, sum(grads) / 2))


def test_what_a_microbatch_is_given_is_not_looked_at_by_places() -> None:
    with pytest.raises(fdp.TraceError, match="looks at its arguments by places in memory in a microbatch"):
        fdp.data_parallel(given_to_a_microbatch, check_replication=False)(torch.arange(4.0), torch.ones(4, 4))
