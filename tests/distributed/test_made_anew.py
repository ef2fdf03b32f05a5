"""A process group that is made anew, as notebooks and restarts do it, has nothing to do with the one before."""

from __future__ import annotations

import gc
import multiprocessing
import time
import weakref
from pathlib import Path

import ranks
import torch
import torch.distributed as dist

import fdp
from fdp.distributed.liveness.watch import has_met, watched_ranks


def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return w + fdp.pmean(batch.sum())


def let_go_late(folder: str) -> tuple[str, str, list[float]]:
    """Call a step on a group, on a second one after it, and again when rank 1 has let go of the first."""
    rank, keys, found = int(multiprocessing.current_process().name.startswith("rank1")), [], []
    train = fdp.data_parallel(step)
    for name in ("first", "second"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
        group = dist.group.WORLD
        found += train(torch.ones(1), torch.full((2,), rank + 1.0)).tolist()
        watched = watched_ranks(group)
        assert group is not None and watched is not None
        keys.append(watched.key)
        while not has_met(group):
            time.sleep(0.01)
        dist.barrier()
        if name == "first":
            first = weakref.ref(group)
            kept = [group] if rank else []
            del group, watched
            dist.destroy_process_group()
    kept.clear()
    gc.collect()
    assert first() is None
    time.sleep(1.0)  # long enough for the other rank to hear of it
    found += train(torch.ones(1), torch.full((2,), rank + 1.0)).tolist()
    dist.barrier()
    dist.destroy_process_group()
    return keys[0], keys[1], found


def test_a_rank_that_lets_go_of_the_old_group_does_not_leave_the_new_one(tmp_path: Path) -> None:
    told = [each.value for each in ranks.run_fresh(2, let_go_late, str(tmp_path), init=False, deadline_s=60)]
    assert told[0] == told[1]  # both give a group the same name
    first, second, found = told[0]
    assert first != second and found == [4.0, 4.0, 4.0]
