"""In-place operators on lists of which an entry reads what an entry before it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from samples import few

import fdp

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def fused_sgd(*lists: list[torch.Tensor]) -> None:
    how: Any = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(*lists, **how, maximize=False, is_first_step=False)


ONE_AFTER_THE_OTHER: dict[str, Call] = {
    "exchanged": lambda a, c, x: torch._foreach_copy_([a, c], [c, a]),
    "added to each other": lambda a, c, x: torch._foreach_add_([a, c], [c, a]),
    "a row": lambda a, c, x: torch._foreach_add_([a, c, x], [torch.ones(5, 3), a, c], alpha=2),
    "twice": lambda a, c, x: torch._foreach_add_([a, a], 1.0),
    "numbers": lambda a, c, x: torch._foreach_mul_([a, a, c], [2.0, 3.0, 4.0]),
    "views": lambda a, c, x: torch._foreach_mul_([a[0:3], a[2:]], x[0, 0].abs() + 1),
    "shifted": lambda a, c, x: torch._foreach_add_(list(a[1:]), list(a[:-1])),
    "three lists": lambda a, c, x: torch._foreach_addcdiv_([a, c], [x, a], [c.abs() + 1, c.abs() + 1], [0.5, 2.0]),
    "weighted": lambda a, c, x: torch._foreach_lerp_([a, c], [c, a], 0.25),
    "alone": lambda a, c, x: torch._foreach_abs_([a, a[1:], c]),
    "momentum of one": lambda a, c, x: fused_sgd([a, c], [x, x], [c, c]),
    "optimizer twice": lambda a, c, x: fused_sgd([a, a], [x, c], [x * 2, x * 3]),
}
INDEPENDENT: dict[str, Call] = {
    "halves": lambda a, c, x: torch._foreach_add_([a[:2], a[2:]], [c[:2], c[2:]]),
    "others": lambda a, c, x: torch._foreach_mul_([a, c], [x, x]),
    "by a new element": lambda a, c, x: torch._foreach_mul_([a[1:], c, x], a[1, 1].clone()),
    "read before": lambda a, c, x: torch._foreach_add_([a, c], [c, x]),
}
ALL = ONE_AFTER_THE_OTHER | INDEPENDENT


def step(state: Any, x: torch.Tensor) -> Any:
    found = []
    for name, lists in state.items():
        other = x * 1
        ALL[name](*lists, other)
        found.append(other)
    return state, found


def given(calls: Iterable[str] = ALL) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    one, two, x = (torch.randn(5, 3, generator=generator) for _ in range(3))
    return {name: (one.clone(), two.clone()) for name in calls}, x


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("compile", [False, True])
def test_entries_are_changed_one_after_the_other(compile: bool, check: bool) -> None:
    options: Any = {"donate_argnums": 0, "check_replication": False, "check_trace": check}
    calls = few(ALL) if compile else ALL
    due, found = step(*given(calls)), fdp.data_parallel(step, compile=compile, **options)(*given(calls))
    torch.testing.assert_close(found, due)


@pytest.mark.parametrize("name", ALL)
def test_only_lists_that_depend_on_each_other_are_taken_apart(name: str) -> None:
    state, x = given()

    def one(state: Any, x: torch.Tensor) -> Any:
        other = x * 1
        ALL[name](*state, other)
        return state, other

    trace = fdp.data_parallel(one, donate_argnums=0, check_replication=False).trace(state[name], x)
    calls = [
        node for node in trace.graph.graph.nodes if "_foreach_" in str(node.target) or "_fused_" in str(node.target)
    ]
    assert (len(calls) > 1) == (name in ONE_AFTER_THE_OTHER)
