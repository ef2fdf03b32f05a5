"""What is true of every schedule: everything is run once, and after what it needs."""

from __future__ import annotations

from typing import Any

from fdp.plan import Plan, Run, Start, Wait


def positions(plan: Plan, kind: type) -> dict[int, int]:
    """Where each bucket's start (or wait) is in the schedule."""
    return {item.bucket: at for at, item in enumerate(plan.schedule) if isinstance(item, kind)}


def bucket_of(plan: Plan) -> dict[int, int]:
    """The bucket of each reduction's operation."""
    return {
        plan.trace.reductions[member].operation: bucket.index for bucket in plan.buckets for member in bucket.members
    }


def needed_by(plan: Plan, item: Any) -> set[int]:
    """The operations whose results an entry of the schedule takes directly."""
    operations = plan.trace.operations
    if isinstance(item, Run):
        return {need for index in item.operations for need in operations[index].needs}
    if isinstance(item, Start):
        members = plan.buckets[item.bucket].members
        return {n for m in members for n in operations[plan.trace.reductions[m].operation].needs}
    return set()


def check_order(plan: Plan) -> None:
    """Everything is run once, and after what it needs."""
    operations, inside = plan.trace.operations, bucket_of(plan)
    runs = [index for item in plan.schedule if isinstance(item, Run) for index in item.operations]
    assert sorted(runs) == [i for i in range(len(operations)) if i not in inside]
    starts, waits = positions(plan, Start), positions(plan, Wait)
    indices = [bucket.index for bucket in plan.buckets]
    assert [i.bucket for i in plan.schedule if isinstance(i, Start)] == indices  # once each, in this order
    assert sorted(i.bucket for i in plan.schedule if isinstance(i, Wait)) == indices
    assert all(starts[index] < waits[index] for index in indices)
    ready: set[int] = set()
    for item in plan.schedule:
        if isinstance(item, Wait):
            ready.update(k for k, bucket in inside.items() if bucket == item.bucket)
        own: set[int] = set()
        if isinstance(item, Run):
            # Lanes of one call run as one; each may need the one before.
            assert len({operations[index].node for index in item.operations}) == 1
            assert len(item.operations) == 1 or all(operations[i].entry is not None for i in item.operations)
            own = set(item.operations)
        assert needed_by(plan, item) <= ready | own, item
        ready |= own
