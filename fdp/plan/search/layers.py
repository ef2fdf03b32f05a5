"""Cut a chain into one, two, three, ... buckets: proves that a plan for many gradients is the best, or finds a better.

The time at which the compute lane has packed a bucket depends only on the bucket's end and on the number of buckets
before it. So for each end and number of buckets only one thing counts: how early the link can be free, among the
solutions that delay nothing beyond the bound. Few beginnings of the bucket need to be tried: if the link is idle by
then, only the last one; if it is busy, those with the earliest end for the bytes that were sent.

References: Shi, Chu and Li, MG-WFBP (INFOCOM 2019), section IV.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from fdp.plan.cost.ticks import Ticks
from fdp.plan.search.chain import Chain

_MOST_STEPS = 400_000
"""After so many beginnings tried in all, the search gives up."""


class Layers:
    """Searches for cuts of a chain with which the step ends before a bound.

    Args:
        chain: of gradients; it is all that is sent, and each bucket may hold any neighbours.
        ticks: what messages take; they do not slow computing down.
    """

    def __init__(self, chain: Chain, ticks: Ticks) -> None:
        assert chain.cut_anywhere and not ticks.slowdown
        self.chain, self.ticks = chain, ticks
        self.count = len(chain.ready)
        self.latency = ticks.latency[chain.op]
        self.on_link = list(itertools.accumulate(chain.on_link, initial=0.0))
        self.packed = list(itertools.accumulate(chain.pack, initial=0.0))
        self.total = chain.tail[-1][-1]
        self.behind = [self.total - row[-1] for row in chain.tail]
        self.next_read = chain.next_read()
        # A message of so many bytes or more keeps the link for its bytes, however long its latency is.
        self.enough = self.latency / (ticks.in_flight - 1) if ticks.in_flight > 1 else 0.0
        self.steps = 0

    def before(self, bound: float) -> tuple[tuple[int, ...], float] | None:
        """Find cuts with which the step ends before a bound.

        Args:
            bound: nanoseconds.

        Returns:
            The ends of its buckets, and when the step ends; None if there is none, or if the search `gave_up`.
        """
        free = [0.0] + [math.inf] * self.count
        origins: list[list[int]] = []
        best: tuple[tuple[int, ...], float] | None = None
        while not self.gave_up and self._over(len(origins) + 1) < bound:
            later, origin = self._layer(len(origins) + 1, free, bound)
            origins.append(origin)
            if later[-1] < math.inf:
                ends = self._traced(origins)
                end = self._end(ends)
                if best is None or end < best[1]:
                    best = ends, end
            if len(origins) > 1 and all(a >= b for a, b in zip(later, free, strict=True)):
                break  # one more bucket frees the link nowhere sooner, and two more do not
            free = later
        return best

    @property
    def gave_up(self) -> bool:
        """Whether the search has tried so many beginnings that it gave up."""
        return self.steps > _MOST_STEPS

    def _packed_at(self, number: int, end: int) -> float:
        """When the last of so many buckets, which ends at a link, is packed."""
        return self.chain.ready[end - 1] + number * self.ticks.start + self.packed[end]

    def _over(self, number: int) -> float:
        """When all work is done, if nothing waits."""
        return self._packed_at(number, self.count) + self.chain.body - self.chain.ready[-1] + self.total

    def _until(self, begin: float, first: int, end: int) -> float:
        """The end of the step that a message alone would cause."""
        done = begin + self.latency + self.on_link[end] - self.on_link[first]
        return done + self.behind[first] if self.next_read[first] < end else done

    def _layer(self, number: int, free: list[float], bound: float) -> tuple[list[float], list[int]]:
        """How early the link can be free after one more bucket, for each end of that; and where the bucket begins.

        Args:
            number: of buckets.
            free: the same for one fewer.
            bound: before which the step has to end.
        """
        later, origin = [math.inf] * (self.count + 1), [0] * (self.count + 1)
        idle = -1  # the last place at which the link is free before the bucket is packed
        busy: list[tuple[float, int]] = []
        # Places at which it is not. Among those with bytes enough, one that is free later by no more than its bytes
        # take is better in all; so what is kept is sorted by that, and what was too late once is too late for good.
        recent, queue = deque[int](), deque[int]()
        for end in range(1, self.count + 1):
            if free[end - 1] < math.inf:
                heapq.heappush(busy, (free[end - 1], end - 1))
                recent.append(end - 1)
            packed = self._packed_at(number, end)
            while busy and busy[0][0] <= packed:
                idle = max(idle, heapq.heappop(busy)[1])
            while recent and self.on_link[end] - self.on_link[recent[0]] >= self.enough:
                first = recent.popleft()
                while queue and free[queue[-1]] - self.on_link[queue[-1]] >= free[first] - self.on_link[first]:
                    queue.pop()
                queue.append(first)
            while recent and recent[0] <= idle:
                recent.popleft()
            while queue and (queue[0] <= idle or self._until(free[queue[0]], queue[0], end) >= bound):
                queue.popleft()
                self.steps += 1
            for first in (*([idle] if idle >= 0 else ()), *([queue[0]] if queue else ()), *recent):
                self.steps += 1
                begin = max(packed, free[first])
                if self._until(begin, first, end) < bound:
                    _, occupied = self.ticks.message(self.chain.op, self.on_link[end] - self.on_link[first])
                    if begin + occupied < later[end]:
                        later[end], origin[end] = begin + occupied, first
        return later, origin

    def _traced(self, origins: list[list[int]]) -> tuple[int, ...]:
        ends = [self.count]
        for origin in reversed(origins[1:]):
            ends.append(origin[ends[-1]])
        return tuple(reversed(ends))

    def _end(self, ends: tuple[int, ...]) -> float:
        """When a step with these cuts ends."""
        free, last, first = 0.0, self._over(len(ends)), 0
        for number, end in enumerate(ends, 1):
            begin = max(self._packed_at(number, end), free)
            free = begin + self.ticks.message(self.chain.op, self.on_link[end] - self.on_link[first])[1]
            last = max(last, self._until(begin, first, end))
            first = end
        return last
