"""Products that are added in place: in one call where that changes no result, and as they were written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

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


def test_a_total_that_its_own_product_reads_is_not_written_while_it_is_read() -> None:
    def function(state: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        state.add_(state @ a)
        return state

    # Zeros hide it at the first call.
    state, a = torch.zeros(4, 4), torch.randn(4, 4)
    step = fdp.data_parallel(function, donate_argnums=0, batch_argnums=())
    expected = state.clone()
    for _ in range(3):
        state += 1
        expected += 1
        state, expected = step(state, a), function(expected, a)
        torch.testing.assert_close(state, expected)
    assert "addmm_(" not in step.plan(state, a).emit().source


def test_a_total_in_the_place_of_what_its_product_reads() -> None:
    def function(state: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        total = state.clone()
        total.add_(state @ a)
        return total

    state, a = torch.randn(4, 4), torch.randn(4, 4)
    expected = function(state.clone(), a)
    torch.testing.assert_close(fdp.data_parallel(function, donate_argnums=0, batch_argnums=())(state, a), expected)


def sums_around_messages(cap: float) -> Any:
    def function(x: torch.Tensor, w: torch.Tensor, meet: Callable[[Any], Any]) -> Any:
        g = x.T @ x
        product = g @ w
        h = (x @ w).tanh().sum(0)
        gm, hm = meet((g, h))
        total = gm * 1.0
        total.add_(product)
        return total, hm

    @fdp.data_parallel(batch_argnums=1, bucket_cap_mb=cap)
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        total, hm = function(x, w, fdp.pmean)
        return fdp.per_rank(total), hm

    torch.manual_seed(0)
    shards, w, rank = torch.randn(2, 5, 4), torch.randn(4, 4), dist.get_rank()
    g = torch.stack([x.T @ x for x in shards]).mean(0)
    h = torch.stack([(x @ w).tanh().sum(0) for x in shards]).mean(0)
    for _ in range(3):
        torch.testing.assert_close(step(w, shards[rank]), function(shards[rank], w, lambda _: (g, h)))
    return None


@pytest.mark.parametrize("cap", [1e-5, 25.0])
def test_a_product_of_what_lies_in_a_bucket_is_computed_before_the_bucket_starts(cap: float) -> None:
    ranks.run(2, sums_around_messages, cap)


def test_a_product_that_is_added_to_itself() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        product = state.t() @ state
        product.add_(product)
        return product * 2

    state, batch = torch.randn(4, 4), torch.ones(2)
    assert torch.equal(fdp.data_parallel(step)(state, batch), step(state, batch))
