"""Order operations, starts and waits.

Each bucket starts as soon as its last member exists. Operations that need the result of a bucket run after all
operations that need none, and after those that need only earlier buckets. So each bucket is waited for as late as its
first reader allows, and the update of one bucket runs while the next is on the wire. There are two exceptions:

- If a bucket is computed from an earlier bucket's result, these operations run as soon as it is the bucket's turn. So a
  parameter is updated during the backward pass, and its new value is gathered.
- Of large buckets that are reduce-scattered, two are under way at most. A whole gradient needs N times the memory of
  the part that a rank keeps of it, and it is free once the bucket has been waited for.

References: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3 (overlap with the backward pass).
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence

from fdp.plan.plan import Bucket, Item, Run, Start, Wait
from fdp.trace.trace import Operation, Reduction

_MOST_UNDER_WAY = 2
"""So many messages that leave each rank a part are under way at most: then the network always has one to send, and the
memory of earlier ones can be used again."""

_FREED_BYTES = 2**20
"""Messages that are smaller do not count: waiting for them would free little memory."""


def order(
    operations: Sequence[Operation], reductions: Sequence[Reduction], buckets: Sequence[Bucket]
) -> tuple[Item, ...]:
    """Order operations, starts and waits.

    Args:
        operations: of the trace, each with what it needs.
        reductions: of the trace.
        buckets: which reductions share a message, in the order in which they start.

    Returns:
        Each operation once (entries of one call that can run together, together), each bucket's start once, and
        its wait once, after it. Operations of one level keep the order of the user's program.
    """
    return _Scheduler(operations, reductions, buckets).run()


class _Scheduler:
    """The schedule so far, and what is still missing.

    Attributes:
        schedule: the items so far.
        levels: the last bucket that each operation has to wait for.
    """

    def __init__(
        self, operations: Sequence[Operation], reductions: Sequence[Reduction], buckets: Sequence[Bucket]
    ) -> None:
        self._operations, self._reductions, self._buckets = operations, reductions, buckets
        self._bucket_of = {reductions[member].operation: b.index for b in buckets for member in b.members}
        self.levels = _levels(operations, self._bucket_of)
        roots = [[reductions[member].operation for member in bucket.members] for bucket in buckets]
        # A bucket can start when all that its members are computed from has run. Views cost nothing: they are run when
        # they are first asked for, so that none holds back a bucket or keeps a value alive.
        self._missing = [real_needs(operations, members, self._bucket_of) for members in roots]
        self._behind = [max((self.levels[member] for member in members), default=-1) for members in roots]
        # Whether a bucket has its place before one that waits for less than it does.
        least = [*itertools.accumulate(reversed(self._behind), min)][::-1]
        self._is_early = [behind > rest for behind, rest in zip(self._behind, least, strict=True)]
        self._waiting_for: dict[int, list[int]] = {}
        for bucket in buckets:
            for need in self._missing[bucket.index]:
                self._waiting_for.setdefault(need, []).append(bucket.index)
        self.schedule: list[Item] = []
        self._done: set[int] = set()
        self._waited: set[int] = set()
        self._next_start = 0
        self._freeing: collections.deque[int] = collections.deque()

    def run(self) -> tuple[Item, ...]:
        """Schedule everything."""
        operations, levels = self._operations, self.levels
        todo = [i for i, operation in enumerate(operations) if not operation.view and i not in self._bucket_of]
        todo.sort(key=lambda i: (levels[i], i))
        for call in calls(operations, levels, todo):
            self._start_ready(levels[call[0]])
            self._call([index for index in call if index not in self._done])
        self._start_ready(math.inf)
        for index, operation in enumerate(operations):
            if operation.view and index not in self._done:
                self._run_views(index)
                self._wait_for(index)
                self._run((index,))
        self.schedule.extend(Wait(bucket.index) for bucket in self._buckets if bucket.index not in self._waited)
        return tuple(self.schedule)

    def _call(self, call: Sequence[int]) -> None:
        """Run an operator call, after the views that it reads through and the waits for the buckets that it reads."""
        for index in call:
            self._run_views(index)
        for index in call:
            self._wait_for(index)
        if call:
            self._run(tuple(call))

    def _run_ahead(self, bucket: int) -> None:
        """Run the operations that a bucket still needs, ahead of their level."""
        needed, pending = set[int](), [self._reductions[member].operation for member in self._buckets[bucket].members]
        while pending:
            for need in self._operations[pending.pop()].needs:
                if need not in needed and need not in self._done and need not in self._bucket_of:
                    needed.add(need)
                    pending.append(need)
        todo = sorted((need for need in needed if not self._operations[need].view), key=lambda i: (self.levels[i], i))
        for call in calls(self._operations, self.levels, todo):
            self._call(call)

    def _run(self, call: tuple[int, ...]) -> None:
        self.schedule.append(Run(call))
        self._done.update(call)
        for index in call:
            for waiting in self._waiting_for.get(index, ()):
                self._missing[waiting].discard(index)

    def _run_views(self, index: int) -> None:
        """Run the views that an operation reads through, oldest first."""
        pending, found = list(self._operations[index].needs), set[int]()
        while pending:
            need = pending.pop()
            if self._operations[need].view and need not in self._done and need not in found:
                found.add(need)
                pending.extend(self._operations[need].needs)
        for need in sorted(found):
            self._wait_for(need)
            self._run((need,))

    def _wait_for(self, index: int) -> None:
        """Wait for the buckets that an operation reads from."""
        for need in self._operations[index].needs:
            bucket = self._bucket_of.get(need)
            if bucket is not None and bucket not in self._waited:
                self._waited.add(bucket)
                self.schedule.append(Wait(bucket))

    def _free_earlier(self, bucket: int) -> None:
        """Wait for an earlier bucket whose memory is free then, before another one of that kind starts."""
        if not _frees_memory(self._buckets[bucket]):
            return
        if len(self._freeing) == _MOST_UNDER_WAY and (earlier := self._freeing.popleft()) not in self._waited:
            self._waited.add(earlier)
            self.schedule.append(Wait(earlier))
        self._freeing.append(bucket)

    def _start_ready(self, level: float) -> None:
        """Start the buckets that can start, up to a level."""
        # In the order of their indices, and no other: all ranks must start them alike. A bucket that is packed from
        # the result of an earlier one has to wait for it, so it stands back behind all that need not wait.
        while self._next_start < len(self._buckets):
            if self._is_early[self._next_start]:
                self._run_ahead(self._next_start)
            elif self._missing[self._next_start] or self._behind[self._next_start] > level:
                return
            self._free_earlier(self._next_start)
            for member in self._buckets[self._next_start].members:
                self._run_views(self._reductions[member].operation)
                self._wait_for(self._reductions[member].operation)
            self.schedule.append(Start(self._next_start))
            self._next_start += 1


def _frees_memory(bucket: Bucket) -> bool:
    """Whether much of a bucket's memory is free once it has been waited for."""
    return bucket.collective.scatters and bucket.size_bytes >= _FREED_BYTES


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
    """The operations that must run before some operations, through views; earlier buckets are not run but waited
    for."""
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
