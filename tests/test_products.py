"""Products that are added in place: in one call where nobody can tell, and as they were written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp


def added(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    total.add_(a @ b)
    return total * 2


def looked_at_twice_from_behind(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    total.add_((a @ b).t().t().detach())
    return total * 2


def also_returned(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    product = a @ b
    total.add_(product)
    return total * 2, product


def also_read(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    product = a @ b
    total.add_(product)
    return total * 2, product.t().sum()


def changed_between(a: torch.Tensor, b: torch.Tensor) -> Any:
    total, left = torch.ones(4, 4), a * 2
    product = left @ b
    left.add_(1)
    total.add_(product)
    return total * 2, left * 2


def transposed(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    total.add_((a @ b).t())
    return total * 2


def of_another_type(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4, dtype=torch.float64)
    total.add_(a @ b)
    return total * 2


def spread(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(3, 4, 4)
    total.add_(a @ b)
    return total * 2


def weighted(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    total.add_(a @ b, alpha=0.5)
    return total * 2


def total_read_between(a: torch.Tensor, b: torch.Tensor) -> Any:
    total = torch.ones(4, 4)
    product = a @ b
    seen = total.sum()
    total.add_(product)
    return total * 2, seen


CASES: dict[Callable[..., Any], bool] = {
    added: True,
    looked_at_twice_from_behind: True,
    total_read_between: True,
    also_returned: False,
    also_read: False,
    changed_between: False,
    transposed: False,
    of_another_type: False,
    spread: False,
    weighted: False,
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_the_sum_is_what_it_was(function: Callable[..., Any]) -> None:
    step = fdp.data_parallel(function, batch_argnums=())
    a, b = torch.randn(4, 5), torch.randn(5, 4)
    for _ in range(2):
        torch.testing.assert_close(step(a, b), function(a, b))
    assert ("addmm_(" in step.plan(a, b).emit().source) == CASES[function]


def test_a_state_that_is_updated_in_place_before_the_product_is_added() -> None:
    def function(state: torch.Tensor, x: torch.Tensor) -> Any:
        total = torch.ones(4, 4)
        product = x @ state
        new = state + 1
        total.add_(product)
        return new, total * 2

    state, x = torch.randn(4, 4), torch.randn(4, 4)
    expected = function(state.clone(), x)
    step = fdp.data_parallel(function, donate_argnums=0, batch_argnums=())
    torch.testing.assert_close(step(state, x), expected)
