"""A second group of some ranks leaves the names of all other groups as they were, on members and on all others."""

from __future__ import annotations

from pathlib import Path

import ranks
import torch
import torch.distributed as dist

import fdp

LIMIT_S = {"deadline_s": 90, "env": {"FDP_LIVENESS_S": "5"}}


def saves_in(part: dist.ProcessGroup, path: str) -> int:
    """Save twice beside a part of the ranks: the second save finds the group that the first has made."""
    with fdp.CheckpointManager(path, group=part) as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.save(2, {"w": torch.zeros(2)})
        return manager.restore({"w": torch.ones(2)})[1]


def after_some_saved(path: str) -> tuple[list[int], float]:
    """Parts that overlap save, one after the other; then all ranks make a group."""
    rank = dist.get_rank()
    found = []
    for number, members in enumerate(([0, 1], [1, 2], [1, 2])):
        part = dist.new_group(members)
        if rank in members:
            found.append(saves_in(part, f"{path}/{number}"))
    together = dist.new_group([0, 1, 2])
    total = torch.ones(1)
    dist.all_reduce(total, group=together)
    return found, total.item()


def test_groups_that_are_made_later_meet(tmp_path: Path) -> None:
    outcomes = ranks.run_fresh(3, after_some_saved, str(tmp_path), **LIMIT_S)
    assert [outcome.value for outcome in outcomes] == [([2], 3.0), ([2, 2, 2], 3.0), ([2, 2], 3.0)], outcomes
