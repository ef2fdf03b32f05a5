"""Order operations, starts and waits.

Each bucket starts as soon as its last member exists. What needs the result of a bucket is put off behind everything
that needs none, and behind what needs only earlier buckets; so each bucket is waited for as late as its first
reader allows, and the update of one bucket runs while the next is on the wire.

References: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3 (overlap with the backward pass).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from fdp.plan.plan import Bucket, Item, Run, Start, Wait
from fdp.trace.trace import Operation, Reduction


def order(
    operations: Sequence[Operation], reductions: Sequence[Reduction], buckets: Sequence[Bucket]
) -> tuple[Item, ...]:
    """Put everything that a step does into one order.

    Args:
        operations: of the trace, each with what it needs.
        reductions: of the trace.
        buckets: which reductions share a message, in the order in which they start.

    Returns:
        Each operation once (entries of one call that can run together, together), each bucket's start once, and
        its wait once, after it. Operations of one level keep the order of the user's program.
    """
    bucket_of = {reductions[member].operation: bucket.index for bucket in buckets for member in bucket.members}
    levels = _levels(operations, bucket_of)
    # A bucket can start when all that its members are computed from has run. Views cost nothing: they are run when
    # they are first asked for, so that none holds back a bucket or keeps a value alive.
    missing = [
        real_needs(operations, [reductions[member].operation for member in bucket.members], bucket_of)
        for bucket in buckets
    ]
    behind = [
        max((levels[reductions[member].operation] for member in bucket.members), default=-1) for bucket in buckets
    ]
    waiting_for: dict[int, list[int]] = {}
    for bucket in buckets:
        for need in missing[bucket.index]:
            waiting_for.setdefault(need, []).append(bucket.index)
    schedule: list[Item] = []
    done: set[int] = set()
    waited: set[int] = set()
    next_start = 0

    def run_views(index: int) -> None:
        """Run the views that an operation looks through, oldest first."""
        pending, found = list(operations[index].needs), set[int]()
        while pending:
            need = pending.pop()
            if operations[need].view and need not in done and need not in found:
                found.add(need)
                pending.extend(operations[need].needs)
        for need in sorted(found):
            wait_for(need)
            schedule.append(Run((need,)))
            done.add(need)

    def wait_for(index: int) -> None:
        for need in operations[index].needs:
            bucket = bucket_of.get(need)
            if bucket is not None and bucket not in waited:
                waited.add(bucket)
                schedule.append(Wait(bucket))

    def start_ready(level: float) -> None:
        # In the order of their indices, and no other: all ranks must start them alike. A bucket that is filled from
        # the result of an earlier one has to wait for it, so it stands back behind all that need not wait.
        nonlocal next_start
        while next_start < len(buckets) and not missing[next_start] and behind[next_start] <= level:
            for member in buckets[next_start].members:
                run_views(reductions[member].operation)
                wait_for(reductions[member].operation)
            schedule.append(Start(next_start))
            next_start += 1

    todo = [i for i, operation in enumerate(operations) if not operation.view and i not in bucket_of]
    todo.sort(key=lambda i: (levels[i], i))
    for call in calls(operations, levels, todo):
        start_ready(levels[call[0]])
        for index in call:
            run_views(index)
        for index in call:
            wait_for(index)
        schedule.append(Run(call))
        done.update(call)
        for index in call:
            for waiting in waiting_for.get(index, ()):
                missing[waiting].discard(index)
    start_ready(math.inf)
    for index, operation in enumerate(operations):
        if operation.view and index not in done:
            run_views(index)
            wait_for(index)
            schedule.append(Run((index,)))
            done.add(index)
    schedule.extend(Wait(bucket.index) for bucket in buckets if bucket.index not in waited)
    return tuple(schedule)


def _levels(operations: Sequence[Operation], bucket_of: dict[int, int]) -> list[int]:
    """The last bucket that each operation has to wait for, through all that it needs; -1 for none."""
    levels: list[int] = []
    for operation in operations:
        level = -1
        for need in operation.needs:
            level = max(level, levels[need], bucket_of.get(need, -1))
        levels.append(level)
    return levels


def real_needs(operations: Sequence[Operation], roots: Sequence[int], bucket_of: dict[int, int]) -> set[int]:
    """What has to run before some operations can, looking through views; earlier buckets are not run but waited for."""
    found: set[int] = set()
    seen: set[int] = set()
    pending = [need for root in roots for need in operations[root].needs]
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        if operations[index].view:
            pending.extend(operations[index].needs)
        elif index not in bucket_of:
            found.add(index)
    return found


def calls(operations: Sequence[Operation], levels: Sequence[int], todo: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Join the entries of one operator call that wait for the same bucket; any other operation is a call of its own."""

    def call_of(index: int) -> tuple[int, str | int]:
        operation = operations[index]
        return levels[index], operation.node if operation.entry is not None else index

    for _, group in itertools.groupby(todo, key=call_of):
        yield tuple(group)
