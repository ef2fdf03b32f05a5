"""Gradients of sharded state that are sent in another dtype: each rank gets its part, and no more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive, some
from sharded_steps import differences, numbers

import fdp
from fdp.distributed import messages
from fdp.distributed.group import resolve_group

NARROW: dict[str, Any] = {"wire_dtype": torch.bfloat16}
WAYS: dict[str, dict[str, Any]] = {"narrow": NARROW, "added in float32": {**NARROW, "accumulate_dtype": torch.float32}}


def no_differences(name: str, compile: bool, options: dict[str, Any]) -> None:
    found = differences(name, compile, **options)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize(
    ("name", "way"),
    some(itertools.product(["Adam", "AdamW, foreach", "accumulated", "by hand", "clipped"], WAYS), 10),
)
def test_two_ranks_compute_on_parts_what_they_compute_on_the_whole(name: str, way: str) -> None:
    ranks.run(2, no_differences, name, False, WAYS[way])


@exhaustive
@pytest.mark.parametrize("name", ["Adam", "clipped", "convolution", "frozen and tied"])
def test_more_ranks_do_where_both_add_in_float32(name: str) -> None:
    ranks.run(3, no_differences, name, False, WAYS["added in float32"])


@pytest.mark.parametrize("way", [pytest.param(way, marks=exhaustive) for way in ("narrow", "added in float32")])
def test_compiled_steps_do(way: str) -> None:
    ranks.run(2, no_differences, "Adam", True, WAYS[way])


def gradient(w: Any, x: torch.Tensor) -> Any:
    return fdp.grad(lambda w: torch.tanh(x @ w).square().sum())(w)


def mean_by_hand(xs: list[torch.Tensor], w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradients of all ranks: rounded, added up in float32, and rounded once more."""
    total = torch.zeros_like(w)
    for x in xs:
        own = w.clone().requires_grad_()
        torch.tanh(x @ own).square().sum().backward()
        total += own.grad.to(dtype).float()  # type: ignore[union-attr]
    return (total / len(xs)).to(dtype).float()


def scattered_gradients(dtype: torch.dtype, accumulate: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    w, xs = numbers(6 * size, 4 * size, seed=1), [numbers(5, 6 * size, seed=10 + each) for each in range(size)]
    options = {"wire_dtype": dtype, "accumulate_dtype": torch.float32 if accumulate else None}
    for dim_first in (True, False):
        state = fdp.shard(w if dim_first else w[:5].contiguous(), min_size=0)
        data = [x if dim_first else x[:, :5] for x in xs]
        whole_w = fdp.unshard(state)
        whole = mean_by_hand(data, whole_w, dtype)
        step = fdp.data_parallel(lambda w, x: (w - gradient(w, x), None), **options)
        found, _ = step(state, data[rank])
        assert torch.equal(fdp.unshard(found), whole_w - whole)
        if accumulate:
            unsharded, _ = fdp.data_parallel(lambda w, x: (w - gradient(w, x), None), **options)(whole_w, data[rank])
            assert torch.equal(fdp.unshard(found), unsharded)
        (sent,) = step.plan(state, data[rank]).trace.gradients
        assert (sent.op, sent.dtype, sent.size_bytes) == ("mean_scatter", dtype, 2 * whole.numel())
        assert sent.accumulate_dtype == (torch.float32 if accumulate else None)
        assert ("added in float32" in step.plan(state, data[rank]).messages) == accumulate


@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(("size", "accumulate"), [(2, False), (3, True), pytest.param(3, False, marks=exhaustive)])
def test_each_rank_gets_its_part_of_the_mean(size: int, accumulate: bool, dtype: torch.dtype) -> None:
    ranks.run(size, scattered_gradients, dtype, accumulate)


def on_a_backend_that_scatters() -> None:
    """Such a backend adds in an order and a dtype of its own: rows are exchanged, and added here."""

    def in_its_own_way(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the backend was to add")

    group, size = resolve_group(), dist.get_world_size()
    own = torch.stack([torch.tensor([257.0 * (rank + 1), 1.0, 3e-3 * (rank + 1)]) for rank in range(size)])
    own = (own * (dist.get_rank() + 1)).bfloat16()
    expected = own.float() / (dist.get_rank() + 1) * sum(range(1, size + 1)) / size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_SCATTERING_BACKENDS", {"gloo"})
        patch.setattr(messages, "_in_rows", lambda buffer, group: False)
        patch.setattr(dist, "reduce_scatter_tensor", in_its_own_way)
        arriving, result = own.new_empty((messages.rows_arriving(size), 3)), own.new_empty(3)
        group.reduce_scatter(result, arriving, own, "mean", accumulate=torch.float32)()
    torch.testing.assert_close(result.float(), expected[dist.get_rank()], rtol=8e-3, atol=0)


@pytest.mark.parametrize("size", [2, 3])
def test_no_backend_adds_where_the_dtype_to_add_in_is_given(size: int) -> None:
    ranks.run(size, on_a_backend_that_scatters)
