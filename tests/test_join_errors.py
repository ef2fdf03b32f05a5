"""Errors of the batches in a loop over fdp.join, and ranks that leave the loop together or alone."""

from __future__ import annotations

import contextlib
import datetime
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from uneven import DOUBLE, broken, data, of_the_gradients, start

import fdp


def raising(at: int, both: bool) -> tuple[int, str, str]:
    rank, step, done = dist.get_rank(), fdp.data_parallel(of_the_gradients), 0
    own: Any = data(((2, 2, 2), (2,)))[rank]
    if rank == 0 or both:
        own = broken(own, at, OSError(f"no disk\udcff\non rank {rank}"))
    try:
        state = start()
        for batch in fdp.join(own):
            state, _ = step(state, batch)
            done += 1
        kind, text = "", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    # All ranks stopped at the same place, so the group is in order.
    fdp.assert_replicated(state)
    assert len(list(fdp.join(data(((1,), (1, 1)))[rank]))) == 2
    return done, kind, text


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_of_one_ranks_batches_stops_all(at: int) -> None:
    (done, kind, text), (others_done, others_kind, others_text) = ranks.run(2, raising, at, False)
    assert (done, kind, text) == (at, "OSError", "no disk\udcff\non rank 0")
    assert (others_done, others_kind) == (at, "PeerError")
    assert others_text.splitlines() == [
        f"fdp.join stopped on all ranks after {at} batches: those of another rank raised an error.",
        "  rank 0: OSError: no disk\\udcff",
        "Remedy: look at the log of that rank.",
    ]


def test_each_rank_raises_its_own_error() -> None:
    for rank, found in enumerate(ranks.run(2, raising, 1, True)):
        assert found == (1, "OSError", f"no disk\udcff\non rank {rank}")


def refusal_of(batches: Any) -> str:
    try:
        list(fdp.join(batches))
    except fdp.FdpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refilled(by: str) -> str:
    def batches() -> Iterator[Tensor]:
        x = torch.ones(3, 2, dtype=torch.bfloat16 if by == "data" else torch.float32).T
        for _ in range(3):
            if by == "torch":
                x.add_(1)
            elif by == "data":
                x.data.add_(1)
            else:
                x.numpy()[:] += 1
            yield x

    return refusal_of(batches() if dist.get_rank() else [torch.ones(2)] * 3)


def no_pickle() -> str:
    return refusal_of([{"x": torch.ones(2), "f": lambda: 0}] if dist.get_rank() else [])


def uncounted() -> str:
    return refusal_of([torch.ones(2), torch.ones(())] if dist.get_rank() else [torch.ones(2)] * 3)


def test_batches_that_cannot_be_joined_are_refused_on_all_ranks() -> None:
    for by in ("torch", "data", "numpy"):
        peer, own = ranks.run(2, refilled, by)
        assert "  rank 1: ArgumentError: the batches of fdp.join are refilled in place" in peer
        assert own.startswith("ArgumentError: the batches of fdp.join are refilled in place: making one changed")
    peer, own = ranks.run(2, uncounted)
    assert "after 1 batches" in peer and "rank 1: ArgumentError: fdp.join does not know how many samples" in peer
    assert own.startswith("ArgumentError: fdp.join does not know how many samples a batch has: a Tensor without")
    for found in ranks.run(2, no_pickle):
        assert found.startswith("ArgumentError: fdp.join cannot give a rank that has no batch one of rank 1's.\n  ")


def leave_together() -> None:
    rank, step, state = dist.get_rank(), fdp.data_parallel(of_the_gradients), start()
    shards = data(((2, 2, 2, 2), (2, 2, 2)))
    for epoch in range(2):
        # Before the step, after it, and one rank by break where the other comes to the end.
        for stop in (0, 2, 3):
            for at, batch in enumerate(fdp.join(shards[rank])):
                if at == stop and epoch == 0:
                    break
                state, _ = step(state, batch)
                if at == stop and (rank == 0 or stop < 3):
                    break
        state, _ = step(state, (shards[rank][0], torch.tensor(1.0, dtype=DOUBLE)))
        assert all(at < 5 for at, _ in enumerate(fdp.join(shards[rank])))
    fdp.assert_replicated(state)


def test_ranks_may_leave_the_loop_together() -> None:
    ranks.run(2, leave_together)


def leave_alone(folder: str) -> list[str]:
    """Rank 1 leaves; its next message says so. Rank 0 learns of it when the group's time is up."""
    rank, state = dist.get_rank(), start()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    step = fdp.data_parallel(of_the_gradients, group=group)
    shards = data(((2, 2, 2, 2), (2, 2, 2, 2)))
    state, _ = step(state, (shards[rank][0], torch.tensor(1.0, dtype=DOUBLE)))
    found = []

    def attempt(call: Callable[[], Any]) -> None:
        with pytest.raises(fdp.PeerError) as caught:
            call()
        found.append(str(caught.value))

    def loop() -> None:
        for at, _ in enumerate(fdp.join(shards[rank], group)):
            if rank == 1 and at == 1:
                break
        step(state, (shards[rank][0], torch.tensor(1.0, dtype=DOUBLE)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDP_AGREE_TIMEOUT_S", "1")
        attempt(loop)
        if rank == 1:
            attempt(lambda: fdp.assert_replicated(state, group))
            attempt(lambda: fdp.replicate(state, group=group))
            attempt(lambda: fdp.save(folder, state, group))
            attempt(lambda: fdp.load(folder, state, group))
            with monkeypatched_default(group):
                attempt(lambda: fdp.pmean(torch.ones(1)))
    return found


@contextlib.contextmanager
def monkeypatched_default(group: Any) -> Iterator[None]:
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


def test_a_rank_that_leaves_alone_is_told(tmp_path: pathlib.Path) -> None:
    (stayed,), left = ranks.run(2, leave_alone, str(tmp_path / "state"))
    calls = ["step 'of_the_gradients'", *(f"fdp.{name}" for name in ("assert_replicated", "replicate", "save", "load"))]
    for text, call in zip(left, [*calls, "fdp.pmean"], strict=True):
        assert text.startswith(f"{call} was called on a process group whose ranks are desynchronised.")
        assert "it left the loop over fdp.join after 2 batches, and rank 0 not within 1 s" in text
    assert "rank 1 left: it is desynchronised" in stayed
