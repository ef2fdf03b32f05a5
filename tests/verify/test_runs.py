"""Runs of bytes: the very bytes that a tensor touches, and the proofs that rely on them."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from fdp.verify import memory, visible_writes
from fdp.verify.memory import Store, view_of
from fdp.verify.runs import both, joined, runs_of, without
from fdp.verify.terms import Term

LENGTH = 400
DTYPES = st.sampled_from([torch.uint8, torch.int16, torch.float32])
DIMENSIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), max_size=4)


def store_at(start: int, dimensions: list[tuple[int, int]], dtype: torch.dtype) -> Store:
    shape, stride = zip(*dimensions, strict=True) if dimensions else ((), ())
    return Store(Term(("x",), (), None, False), start, shape, stride, dtype)


def touched(one: Store) -> set[int]:
    """Byte by byte."""
    found = {0}
    for size, step in zip(one.shape, one.stride, strict=True):
        found = {at + index * step for at in found for index in range(size)}
    size = one.dtype.itemsize
    return {one.start + at * size + byte for at in found for byte in range(size)}


def as_bytes(runs: Any) -> set[int]:
    assert runs is not None and runs == joined(runs)
    return {byte for low, high in runs for byte in range(low, high)}


@given(st.integers(0, 50), DIMENSIONS, DTYPES, st.integers(0, 50), DIMENSIONS, DTYPES)
def test_runs_are_the_bytes_that_are_touched(
    one_at: int, one_dims: Any, one_dtype: torch.dtype, two_at: int, two_dims: Any, two_dtype: torch.dtype
) -> None:
    one, two = store_at(one_at, one_dims, one_dtype), store_at(two_at, two_dims, two_dtype)
    mine, theirs = runs_of(one), runs_of(two)
    assert as_bytes(mine) == touched(one) and as_bytes(theirs) == touched(two)
    assert mine is not None and theirs is not None
    assert as_bytes(both(mine, theirs)) == touched(one) & touched(two)
    assert as_bytes(without(mine, theirs)) == touched(one) - touched(two)


def test_what_has_too_many_runs_has_none() -> None:
    assert runs_of(store_at(0, [(5000, 2)], torch.float32)) is None
    assert runs_of(store_at(0, [(4000, 2)], torch.float32)) is not None


def scattered_together(units: int) -> None:
    """Members of a bucket of a reduce-scatter have gaps: other members lie between their rows."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = fdp.pmean_scatter([(x.t() @ x).t(), x.sum(0), (x * 2).sum(0)])
        return w + sum(fdp.psum(part.sum()) for part in found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible_writes, "_EXACT_UNITS", units)  # as for large tensors
        made = fdp.data_parallel(step, bucket_cap_mb=100)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(int(fdp.axis_index())))
        assert len(made.plan(torch.zeros(()), x).buckets) == 2
        found = made(torch.zeros(()), x)
    mean = fdp.pmean(torch.stack([(x.t() @ x).sum(), 3 * x.sum()])).sum()
    assert torch.allclose(found, mean, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("units", [2**22, 8])
def test_rows_of_large_members_are_told_apart(units: int) -> None:
    ranks.run(2, scattered_together, units)


def test_a_view_of_one_run_is_one() -> None:
    block = memory.Block("fresh")
    assert runs_of(view_of(block, 2, (4, 3), (3, 1), torch.float32)) == [(8, 56)]
