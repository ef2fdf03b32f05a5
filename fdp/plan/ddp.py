"""The same step as `DistributedDataParallel` would run it, as a plan: the peer, on the same cost model.

DDP copies each gradient into its bucket as soon as it exists, starts a bucket when it is full, and, once the backward
pass is over, waits for one bucket after the other and copies it back into the gradients; the optimizer comes after
the last. What is not modelled favours DDP: its hooks cost nothing, buffers are not broadcast, and what is not a
gradient (a loss that the step averages) is not sent.

References: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2 and 4.2; torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fdp.plan.buckets import MIB, ReductionKind, make_buckets
from fdp.plan.cost.costs import Costs
from fdp.plan.plan import Bucket, Item, Plan, Run, Start, Wait
from fdp.plan.schedule import real_needs
from fdp.trace.trace import Operation, Reduction, Trace

DDP_CAPS_MB = (1.0, 25.0)
"""DDP's default: a first bucket of 1 MiB, and then of 25 MiB."""


def plan_as_ddp(
    trace: Trace, costs: Costs, caps_mb: Sequence[float] = DDP_CAPS_MB, overlap: bool = True
) -> tuple[Plan, Costs]:
    """Plan a step as DDP runs it, from its second iteration on, when its buckets follow the order of production.

    Args:
        trace: of the step. Gradients are its reductions of that kind; if there are none, whatever it averages.
        costs: of the step's operations.
        caps_mb: the cap of the first bucket, the next, ..., the last for all that follow, in MiB. As in DDP, a bucket
            is closed by the gradient that carries it to its cap or over it; with a cap of 0 each is sent alone.
        overlap: whether messages start during the backward pass, or all after it.

    Returns:
        The plan, whose trace has DDP's copies as operations of their own, and the costs that belong to it.
    """
    gradients = [k for k, r in enumerate(trace.reductions) if r.kind == "gradient" and r.numel]
    gradients = gradients or [k for k, r in enumerate(trace.reductions) if r.op == "mean" and r.numel]
    stages = _stages(trace.operations, {trace.reductions[k].operation for k in gradients})
    stage_of = {k: stages[trace.reductions[k].operation] for k in gradients}
    groups = [
        group
        for stage in sorted(set(stage_of.values()))
        for group in assign([k for k in gradients if stage_of[k] == stage], trace.reductions, caps_mb)
    ]
    buckets = make_buckets(trace.reductions, groups, trace.dimensions)
    copies = _Copies(len(trace.operations))
    schedule: list[Item] = []
    for stage in range(max(stages, default=-1) + 1):
        own = [bucket for bucket in buckets if stage_of[bucket.members[0]] == stage]
        schedule += _computed(trace, [k for k, its in enumerate(stages) if its == stage], own, copies, overlap)
        for bucket in own:
            schedule.append(Wait(bucket.index))
            needs = tuple(trace.reductions[member].operation for member in bucket.members)
            schedule.append(copies.add("copy out of the bucket", needs, bucket.size_bytes, backward=False))
    seconds = (size_bytes * costs.pack_s_per_byte for size_bytes in copies.sizes_bytes)
    return (
        Plan(
            dataclasses.replace(
                trace, name=f"{trace.name} under DDP", operations=(*trace.operations, *copies.operations)
            ),
            buckets,
            tuple(schedule),
            tuple(caps_mb),
        ),
        dataclasses.replace(costs, operations_s=(*costs.operations_s, *seconds), pack_s_per_byte=0.0),
    )


def assign(members: Sequence[int], reductions: Sequence[Reduction], caps_mb: Sequence[float]) -> list[tuple[int, ...]]:
    """Put gradients into DDP's buckets, as `compute_bucket_assignment_by_size` does.

    Args:
        members: indices of the gradients, in production order.
        reductions: of the trace.
        caps_mb: as for `plan_as_ddp`; counted apart for each dtype and device.

    Returns:
        The members of each bucket, in the order in which DDP starts them: as they fill up, and then what is left.
    """
    open_members: dict[ReductionKind, list[int]] = {}
    closed: dict[ReductionKind, int] = {}
    groups: list[tuple[int, ...]] = []
    for member in members:
        kind = reductions[member].dtype, str(reductions[member].device)
        own = open_members.setdefault(kind, [])
        own.append(member)
        cap_mb = caps_mb[min(closed.get(kind, 0), len(caps_mb) - 1)]
        if sum(reductions[k].size_bytes for k in own) >= cap_mb * MIB:
            groups.append(tuple(open_members.pop(kind)))
            closed[kind] = closed.get(kind, 0) + 1
    return groups + [tuple(own) for own in open_members.values()]


@dataclasses.dataclass
class _Copies:
    """Operations that DDP adds to those of the trace.

    Attributes:
        first: the index that the first of them gets.
        operations: the copies.
        sizes_bytes: bytes that each moves.
    """

    first: int
    operations: list[Operation] = dataclasses.field(default_factory=list)
    sizes_bytes: list[int] = dataclasses.field(default_factory=list)

    def add(self, target: str, needs: tuple[int, ...], size_bytes: int, backward: bool) -> Run:
        """Add a copy, and return the item that runs it."""
        self.operations.append(Operation(target, target, needs, backward=backward))
        self.sizes_bytes.append(size_bytes)
        return Run((self.first + len(self.operations) - 1,))


def _stages(operations: Sequence[Operation], gradients: set[int]) -> list[int]:
    """For each operation, how many backward passes of DDP have to be over before it.

    A gradient that is computed from averaged ones (a GAN in one step) belongs to a module of its own, wrapped apart.
    """
    stages: list[int] = []
    for operation in operations:
        stages.append(max((stages[need] + (need in gradients) for need in operation.needs), default=0))
    return stages


def _computed(
    trace: Trace, indices: Sequence[int], buckets: Sequence[Bucket], copies: _Copies, overlap: bool
) -> list[Item]:
    """Run operations in the order of the program, copy each gradient when it is there, and start full buckets."""
    made_at: dict[int, list[int]] = {}
    inside = set(indices)
    for bucket in buckets:
        for member in bucket.members:
            makers = real_needs(trace.operations, [trace.reductions[member].operation], {})
            made_at.setdefault(max((k for k in makers if k in inside), default=-1), []).append(member)
    home = {member: bucket.index for bucket in buckets for member in bucket.members}
    missing = {bucket.index: len(bucket.members) for bucket in buckets}
    waiting = [bucket.index for bucket in buckets]
    items: list[Item] = []
    for index in [-1, *indices]:
        if index >= 0 and trace.operations[index].reduction is None:
            items.append(Run((index,)))
        for member in made_at.get(index, ()):
            reduction = trace.reductions[member]
            needs = trace.operations[reduction.operation].needs
            items.append(copies.add("copy into the bucket", needs, reduction.size_bytes, backward=True))
            missing[home[member]] -= 1
        while overlap and waiting and not missing[waiting[0]]:
            items.append(Start(waiting.pop(0)))
    items.extend(Start(bucket) for bucket in waiting)
    return items
