"""The memory of buckets: one flat buffer each, and the views through which the program fills and reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fdp.group import Group, start_all_gather, start_all_reduce, start_broadcast
from fdp.plan import Bucket, Plan
from fdp.trace import Reduction


@dataclass(frozen=True)
class Buffer:
    """One bucket in memory.

    Attributes:
        bucket: its description.
        own: what this rank contributes, flat; for all but an all-gather the result is in the same place.
        gathered: [ranks, numel] for an all-gather, else None.
        pack: views of `own`, one a member, to be filled.
        result: views of what the ranks made of it, one a member.
    """

    bucket: Bucket
    own: torch.Tensor
    gathered: torch.Tensor | None
    pack: list[torch.Tensor]
    result: list[torch.Tensor]

    def start(self, group: Group) -> Callable[[], None]:
        """Start the collective; returns the function that waits for it."""
        if self.gathered is not None:
            return start_all_gather(self.gathered, self.own, group)
        if self.bucket.op == "broadcast":
            return start_broadcast(self.own, self.bucket.root, group)
        return start_all_reduce(self.own, self.bucket.op, group)

    def pretend(self) -> None:
        """Do what the collective would do if every rank held what this one holds, and a mean or sum were a pick."""
        if self.gathered is not None:
            self.gathered.copy_(self.own.expand_as(self.gathered))


def allocate(plan: Plan) -> list[Buffer | None]:
    """Take the memory for every bucket of a plan; None for one that a world of one does not need."""
    size = plan.trace.world_size
    return [
        _allocate(bucket, plan.trace.reductions, size) if size > 1 or bucket.op == "all_gather" else None
        for bucket in plan.buckets
    ]


def _allocate(bucket: Bucket, reductions: tuple[Reduction, ...], size: int) -> Buffer:
    own = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
    pack = [
        own.narrow(0, offset, reductions[member].numel).view(reductions[member].shape)
        for member, offset in zip(bucket.members, bucket.offsets, strict=True)
    ]
    if bucket.op != "all_gather":
        return Buffer(bucket, own, None, pack, pack)
    gathered = torch.zeros((size, bucket.numel), dtype=bucket.dtype, device=bucket.device)
    (member,) = bucket.members
    return Buffer(bucket, own, gathered, pack, [gathered.view(size, *reductions[member].shape)])
