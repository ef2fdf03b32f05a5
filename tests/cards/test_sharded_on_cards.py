"""Sharded state, and collectives of parts, by NCCL."""

from __future__ import annotations

import cards
import pytest
import sharded_steps
import stacked
import torch
import torch.distributed as dist
from cards import needs_a_card, on_card

import fdp

pytestmark = needs_a_card


@pytest.mark.parametrize("compile", [False, True], ids=["op by op", "compiled"])
@pytest.mark.parametrize("name", sharded_steps.STEPS)
def test_sharded_state_trains_as_whole_state_does(name: str, compile: bool) -> None:
    for found in cards.run(2, sharded_steps.all_differences, [name], compile, device="cuda"):
        assert not found, "\n".join(found)


def values(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-50, 50, shape, generator=generator).to(dtype) for _ in range(size)]


def exchanges() -> None:
    """Whole numbers, so that any order of addition gives the same bits; expected by lists, on the CPU."""
    rank, n = dist.get_rank(), dist.get_world_size()
    step_of = lambda fn: fdp.data_parallel(lambda x: fdp.per_rank(fn(x * 1)))  # noqa: E731
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        xs = values(n, (2 * n, 3), dtype)
        total = torch.stack(xs).sum(0).to(dtype)
        ring = [(source, (source + 1) % n) for source in range(n)]
        expected = {
            "psum": (fdp.psum, total),
            "pmax": (fdp.pmax, torch.stack(xs).amax(0)),
            "pmin": (fdp.pmin, torch.stack(xs).amin(0)),
            "all_gather": (fdp.all_gather, torch.stack(xs)),
            "broadcast": (lambda x: fdp.broadcast(x, root=n - 1), xs[n - 1]),
            "psum_scatter": (fdp.psum_scatter, stacked.psum_scatter(xs)[rank]),
            "all_to_all": (lambda x: fdp.all_to_all(x, 0, 0), stacked.all_to_all(xs, 0, 0)[rank]),
            "ppermute": (lambda x, ring=ring: fdp.ppermute(x, ring), stacked.ppermute(xs, ring)[rank]),
        }
        if dtype.is_floating_point:
            expected["pmean"] = (fdp.pmean, (total.double() / n).to(dtype))
        for name, (fn, wanted) in expected.items():
            for how, call in (("outside", fn), ("in a step", step_of(fn))):
                found = call(xs[rank].cuda())
                assert found.is_cuda and found.dtype == dtype, (name, how)
                assert torch.equal(found.cpu(), wanted), (name, how, dtype, found, wanted)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives(world: int) -> None:
    cards.run(world, exchanges)


def wired() -> None:
    """Sixteen bits on the wire: eight of them hold these whole numbers, their sums, and the means of two."""
    rank = dist.get_rank()
    xs = [x.float() for x in values(2, (64, 40), torch.float32)]
    for accumulated in ({}, {"accumulate_dtype": torch.float32}):
        options = {"wire_dtype": torch.bfloat16, **accumulated}
        step = fdp.data_parallel(lambda w, x: fdp.grad(lambda w: (w * x).sum())(w), **options)
        found = step(on_card(torch.ones(64, 40)), xs[rank].cuda())
        assert torch.equal(found.cpu(), (xs[0] + xs[1]) / 2), options


def test_wire_dtype() -> None:
    cards.run(2, wired)
