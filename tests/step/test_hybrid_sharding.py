"""State that is sharded along one dimension of a mesh and replicated along the other, beside whole state."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import ranks
import torch
from bits import same_bits
from meshes import mesh_of
from samples import ALL_SAMPLES, exhaustive
from sharded_steps import STEPS, differences, numbers

import fdp
from fdp import pytree

DEFAULT = {"in place"}
"""Gradients, state that is changed, and a number of all parts; the others are much like it."""


def no_differences(names: list[str], sizes: tuple[int, ...], compile: bool) -> None:
    mesh = mesh_of(sizes)
    found = [line for name in names for line in differences(name, compile, mesh=mesh)]
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in DEFAULT else exhaustive) for name in STEPS])
def test_two_hosts_of_two_ranks_compute_what_whole_state_gives(name: str) -> None:
    ranks.run(4, no_differences, [name], (2, 2), False)


@pytest.mark.parametrize("name", [pytest.param(name, marks=exhaustive) for name in ("clipped", "accumulated")])
def test_compiled_steps_do(name: str) -> None:
    ranks.run(4, no_differences, [name], (2, 2), True)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param((2, 1), marks=exhaustive), (1, 2), *(((1, 2, 2), (2, 2, 1), (3, 2), (2, 3)) if ALL_SAMPLES else ())],
)
def test_meshes_of_other_shapes(sizes: tuple[int, ...]) -> None:
    """Of one rank along a dimension, and of three dimensions."""
    ranks.run(torch.Size(sizes).numel(), no_differences, ["clipped", "AdamW, single"][: 1 + ALL_SAMPLES], sizes, False)


def update(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    loss, grad = fdp.value_and_grad(lambda w: (x @ w).square().mean())(state["w"])
    moved = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * moved, "m": moved}, fdp.pmean(loss)


def state_of() -> Any:
    return {"w": numbers(8, 6), "m": torch.zeros(8, 6)}


def messages() -> None:
    """Gradients: reduce-scattered within hosts, their parts averaged between them; parameters gathered within hosts."""
    mesh = mesh_of((2, 2))
    step = fdp.data_parallel(update, group=mesh)
    state = fdp.shard(state_of(), min_size=0, group=mesh)
    assert [leaf.to_local().shape for leaf in pytree.leaves_of(state)] == [(4, 6), (4, 6)]
    assert [str(leaf.placements) for leaf in pytree.leaves_of(state)] == ["(Replicate(), Shard(dim=0))"] * 2
    plan = step.plan(state, torch.ones(4, 8))
    sent = {bucket.op_along for bucket in plan.buckets}
    assert sent == {"all_gather along local", "mean_scatter along local", "mean along hosts", "mean"}
    scattered, averaged = (
        next(bucket for bucket in plan.buckets if bucket.op_along == op)
        for op in ("mean_scatter along local", "mean along hosts")
    )
    assert scattered.size_bytes == 8 * 6 * 4 and averaged.size_bytes == 4 * 6 * 4
    assert "mean_scatter along local" in str(plan) and "mean along hosts" in str(plan.trace)


def test_gradients_are_scattered_within_hosts_and_averaged_between_them() -> None:
    ranks.run(4, messages)


def saved(folder: str) -> None:
    """What two hosts hold twice is saved once, and comes back on the mesh, on all ranks, and whole."""
    mesh, rank = mesh_of((2, 2)), int(fdp.axis_index())
    step = fdp.data_parallel(update, group=mesh)
    state = fdp.shard(state_of(), min_size=0, group=mesh)
    for call in range(2):
        state, _ = step(state, numbers(4, 8, seed=10 * call + rank))
    fdp.save(folder, state)
    due = fdp.unshard(state)
    for like in (
        fdp.shard(state_of(), min_size=0, group=mesh),
        fdp.shard(state_of(), min_size=0),
        state_of(),
    ):
        found = fdp.load(folder, like)
        assert pytree.structure_of(found) == pytree.structure_of(like)
        for one, two in zip(pytree.leaves_of(fdp.unshard(found)), pytree.leaves_of(due), strict=True):
            assert same_bits(one, two)
    again, _ = step(fdp.load(folder, fdp.shard(state_of(), min_size=0, group=mesh)), numbers(4, 8, seed=50 + rank))
    more, _ = step(state, numbers(4, 8, seed=50 + rank))
    for one, two in zip(pytree.leaves_of(fdp.unshard(again)), pytree.leaves_of(fdp.unshard(more)), strict=True):
        assert same_bits(one, two)


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    ranks.run(4, saved, str(tmp_path / "state"))


def counts(sizes: tuple[int, ...]) -> None:
    """Whole numbers that are added up over all ranks into sharded state."""
    mesh, rank = mesh_of(sizes), int(fdp.axis_index())
    for dtype in (torch.int64, torch.uint8):
        state = fdp.shard({"seen": torch.zeros(64, dtype=dtype)}, min_size=0, group=mesh)

        def count(state: Any, ids: torch.Tensor, dtype: torch.dtype = dtype) -> Any:
            ones = torch.ones_like(ids, dtype=dtype)
            return {"seen": state["seen"] + fdp.psum(torch.zeros(64, dtype=dtype).index_add(0, ids, ones))}

        step, seen = fdp.data_parallel(count, group=mesh), []
        for call in range(2):
            drawn = [
                torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(10 * call + r)) for r in range(4)
            ]
            seen += drawn
            state = step(state, drawn[rank])
        assert torch.equal(fdp.unshard(state)["seen"], torch.cat(seen).bincount(minlength=64).to(dtype))


def test_whole_numbers_are_added_up_over_all_ranks() -> None:
    ranks.run(4, counts, (2, 2))


def hosts_that_differ(folder: str) -> None:
    """Hosts that begin with other values, and a copy of a part that has changed: the first comparison names it."""
    mesh, rank = mesh_of((2, 2)), int(fdp.axis_index())
    step = fdp.data_parallel(update, group=mesh)
    own = fdp.shard({"w": numbers(8, 6, seed=rank // 2), "m": torch.zeros(8, 6)}, min_size=0, group=mesh)
    with pytest.raises(fdp.ReplicationError, match=r"part 0 of state\['w'\]: rank 2 differs from rank 0") as error:
        step(own, torch.ones(4, 8))
    assert "part 1 of state['w']: rank 3 differs from rank 1" in str(error.value) and "['m']" not in str(error.value)
    state = fdp.shard(state_of(), min_size=0, group=mesh)
    fdp.assert_replicated(state, group=mesh)
    if rank == 3:
        state["m"].to_local().add_(1)
    for compare in (lambda: fdp.assert_replicated(state, group=mesh), lambda: fdp.save(folder, state)):
        with pytest.raises(fdp.ReplicationError, match=r"\['m'\]: rank 3 of 4"):
            compare()


def test_hosts_that_hold_other_parts_are_named(tmp_path: pathlib.Path) -> None:
    ranks.run(4, hosts_that_differ, str(tmp_path / "state"))


def refusals() -> None:
    mesh = mesh_of((2, 2))
    step = fdp.data_parallel(update, group=mesh)
    with pytest.raises(fdp.TraceError, match="of another mesh"):
        step(fdp.shard(state_of(), min_size=0), torch.ones(4, 8))
    with pytest.raises(fdp.TraceError, match="of another mesh"):
        step(fdp.shard(state_of(), min_size=0, group=mesh["local"]), torch.ones(4, 8))
    with pytest.raises(fdp.TraceError, match="of another mesh"):
        fdp.data_parallel(update)(fdp.shard(state_of(), min_size=0, group=mesh), torch.ones(4, 8))
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    turned = {key: distribute_tensor(x, mesh, [Shard(0), Replicate()]) for key, x in state_of().items()}
    with pytest.raises(fdp.TraceError, match="divided by"):
        step(turned, torch.ones(4, 8))
    trace = step.trace(fdp.shard(state_of(), min_size=0, group=mesh), torch.ones(4, 8))
    with pytest.raises(fdp.ArgumentError, match="says nothing of"):
        trace.plan(network=fdp.Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9), world_size=8)


def test_bad_input() -> None:
    ranks.run(4, refusals)
