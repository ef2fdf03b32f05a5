"""Cut a chain of gradients into buckets such that the step ends as early as it can: dynamic programming, exactly.

A way to cut the first gradients is known by four numbers: when the compute lane has filled the last bucket, when the
link is free again, until when messages are under way, and how late the optimizer ends because of what has been sent so
far. One way that is no worse in all four is no worse whatever follows; so of each prefix only the ways that no other
one beats are kept, and of them only those that can still beat the best plan known.

References: Shi, Chu and Li, MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms
(INFOCOM 2019), section IV, merges gradients under latency and bandwidth. Here messages also cost time on the compute
lane, may overlap, may slow computing down, and the optimizer runs between waits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from fdp.plan.chain import Chain, Fixed
from fdp.plan.ticks import Ticks

_MOST_WAYS = 256
"""Ways to cut a prefix that are kept. Were there more, those that promise least would be dropped, and that be said."""

_SLOWED_WAYS = 16
"""The same where messages slow computing down. Then every message that is sent earlier or later leaves another time
behind, and hardly any way beats another in everything."""

# Rows of a table of ways, one column a way.
_NOW, _FREE, _BUSY, _WORST, _DONE_WORK, _CUT, _ID = range(7)


@dataclass(frozen=True)
class Cuts:
    """Where a chain is cut.

    Attributes:
        ends: for each bucket, how many links come before its end; empty if nothing ends before the bound.
        end: when the step ends, in nanoseconds.
        ways: the most ways to cut one prefix that were kept.
        proven: whether nothing ends earlier.
    """

    ends: tuple[int, ...]
    end: float
    ways: int
    proven: bool


def best_cuts(chain: Chain, ticks: Ticks, bound: float) -> Cuts:
    """Find the buckets with which a step ends earliest.

    The time that it takes is quadratic in the number of links, times the ways that are kept of a prefix (few, and at
    most 256).

    Args:
        chain: of gradients.
        ticks: what messages take.
        bound: an end that is known to be possible, in nanoseconds.

    Returns:
        The cuts, a function of the arguments alone.
    """
    search = _Search(chain, ticks, bound, _SLOWED_WAYS if ticks.slowdown else _MOST_WAYS)
    ends, end = search.run() or ((), bound)
    return Cuts(ends, end, search.count, not search.dropped)


class _Search:
    """One pass over the prefixes of a chain, from short to long.

    The optimizer's part is counted in work: a message that is done at t, with V of the tail behind its wait, has the
    step end no earlier than when work (1 - slowdown) t + V is done, at the pace of a compute lane that is slowed down
    until the last message is done, and not after.
    """

    def __init__(self, chain: Chain, ticks: Ticks, bound: float, most: int) -> None:
        self.chain, self.ticks, self.bound, self.most = chain, ticks, bound, most
        self.speed = 1 - ticks.slowdown
        self.dropped = False
        self.count = 0
        self.history: list[tuple[int, int]] = [(0, -1)]  # of each way: where it ends, and the way that it goes on from
        self.latency, self.per_byte = ticks.latency[chain.op], ticks.per_byte[chain.op]
        self.tail = torch.tensor(chain.tail, dtype=torch.float64, device="cpu")
        self.total = chain.tail[-1][-1]
        self.bytes = _numbers(itertools.accumulate(chain.size_bytes, initial=0))
        self.pack = list(itertools.accumulate(chain.pack, initial=0.0))
        self.packed = _numbers(self.pack)
        # The first link from which on some work waits, counted from each: a bucket that ends before is waited for last.
        self.next_read = [len(chain.read)] * (len(chain.read) + 1)
        for link in range(len(chain.read) - 1, -1, -1):
            self.next_read[link] = link if chain.read[link] else self.next_read[link + 1]
        self.unread_until = _numbers(self.next_read)
        # No plan is faster than its bytes: those from link p on leave only when p is ready.
        count, all_bytes = len(chain.ready), float(self.bytes[-1])
        self.bytes_left = [0.0] * (count + 1)
        self.latest_bytes = [-float("inf")] * (count + 1)
        for link in range(count - 1, -1, -1):
            self.bytes_left[link] = self.per_byte * (all_bytes - float(self.bytes[link])) - (count - link)
            self.latest_bytes[link] = max(self.latest_bytes[link + 1], chain.ready[link] + self.bytes_left[link])
        self.after_cut = _numbers(self.bytes_left)

    def run(self) -> tuple[tuple[int, ...], float] | None:
        """Search; returns the ends of buckets and of the step, None if nothing ends before the bound."""
        chain = self.chain
        opened = torch.zeros(7, 1, dtype=torch.float64, device="cpu")
        events = 0
        for end in range(1, len(chain.ready) + 1):
            while events < len(chain.fixed) and chain.fixed[events].after < end:
                opened = self._pass(opened, chain.fixed[events], events)
                events += 1
            opened = opened[:, opened[_CUT] >= chain.not_with[end - 1]]
            extended, hopeless = self._extend(opened, end, events)
            opened = torch.cat([opened[:, ~hopeless], self._keep(extended, end, events)], dim=1)
            if not opened.shape[1]:
                return None
        opened = opened[:, opened[_CUT] == len(chain.ready)]
        for number in range(events, len(chain.fixed)):
            opened = self._pass(opened, chain.fixed[number], number)
        if not opened.shape[1]:
            return None
        now = self._advance(opened[_NOW], chain.body - opened[_DONE_WORK], opened[_BUSY])
        ends = self._end(now, opened[_BUSY], opened[_WORST])
        best = int(ends.argmin())
        if float(ends[best]) >= self.bound:
            return None
        way, cuts = int(opened[_ID, best]), list[int]()
        while way > 0:
            cuts.append(self.history[way][0])
            way = self.history[way][1]
        return tuple(reversed(cuts)), float(ends[best])

    def _advance(self, now: torch.Tensor, work: torch.Tensor, busy: torch.Tensor) -> torch.Tensor:
        """When the compute lane has done some work."""
        if self.speed == 1:
            return now + work
        slow = torch.minimum((busy - now).clamp(min=0), work / self.speed)
        return now + (slow + (work - slow * self.speed))

    def _end(self, now: torch.Tensor, busy: torch.Tensor, worst: torch.Tensor) -> torch.Tensor:
        """When a step ends whose body ends at `now`."""
        last = torch.maximum(now, busy)
        return torch.maximum(self.speed * now + self.total, worst) + self.ticks.slowdown * last

    def _pass(self, ways: torch.Tensor, fixed: Fixed, number: int) -> torch.Tensor:
        """Let a bucket of another kind start, in every way."""
        now = self._advance(ways[_NOW], fixed.ready - ways[_DONE_WORK], ways[_BUSY])
        now = self._advance(now, torch.full_like(now, fixed.filling), ways[_BUSY])
        begin = torch.maximum(now, ways[_FREE])
        done = begin + fixed.whole
        before = self.tail[ways[_CUT].long(), number] if fixed.read else torch.full_like(now, self.total)
        worst = torch.maximum(ways[_WORST], self.speed * done + (self.total - before))
        busy = torch.maximum(ways[_BUSY], done)
        ready = torch.full_like(now, fixed.ready)
        return torch.stack([now, begin + fixed.occupied, busy, worst, ready, ways[_CUT], ways[_ID]])

    def _extend(self, ways: torch.Tensor, end: int, events: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Close a bucket at `end` in every way; and tell which ways need not be tried with a later end."""
        chain, cut = self.chain, ways[_CUT].long()
        ready = chain.ready[end - 1]
        now = self._advance(ways[_NOW], ready - ways[_DONE_WORK], ways[_BUSY])
        now = self._advance(now, self.ticks.start + (self.packed[end] - self.packed[cut]), ways[_BUSY])
        begin = torch.maximum(now, ways[_FREE])
        by_bytes = (self.per_byte * (self.bytes[end] - self.bytes[cut])).round()
        whole = by_bytes + self.latency
        occupied = torch.maximum(by_bytes, (whole / self.ticks.in_flight).round())
        done = begin + whole
        behind = self.total - self.tail[cut, events]
        behind = torch.where(self.unread_until[cut] < end, behind, 0.0)
        busy = torch.maximum(ways[_BUSY], done)
        worst = torch.maximum(ways[_WORST], self.speed * done + behind)
        number = torch.full_like(now, ready)
        extended = torch.stack([now, begin + occupied, busy, worst, number, torch.full_like(now, end), ways[_ID]])
        # With a later end this bucket is done no earlier, and all bytes from its first on come after `begin`.
        least = torch.where(self.unread_until[cut] < end, self.total - self.tail[cut, -1], 0.0)
        last = begin + (self.after_cut[cut] + self.latency)
        hopeless = self.speed * done + least + self.ticks.slowdown * done >= self.bound
        hopeless |= self._least_end(last) >= self.bound
        return extended, hopeless

    def _least_end(self, last: torch.Tensor) -> torch.Tensor:
        """The earliest end of a step whose last bucket of the chain is done at `last`."""
        behind = self.total - self.chain.tail[-2][-1] if self.chain.read[-1] else 0.0
        return last + behind

    def _keep(self, ways: torch.Tensor, end: int, events: int) -> torch.Tensor:
        """Drop ways that cannot beat the bound, or that another way beats whatever follows."""
        chain, ticks = self.chain, self.ticks
        now, free, busy = ways[_NOW], ways[_FREE], ways[_BUSY]
        more = chain.fixed[events:]
        fill = self.pack[-1] - self.pack[end] + sum(fixed.filling for fixed in more)
        least = torch.zeros_like(now)
        last = busy
        if end < len(chain.ready):
            fill += ticks.start
            own = torch.maximum(
                free + self.bytes_left[end], now + (self.latest_bytes[end] - chain.ready[end - 1] + ticks.start)
            )
            least = self._least_end(own + self.latency)
            last = torch.maximum(last, own + self.latency)
        over = now + (chain.body - chain.ready[end - 1] + fill)
        least = torch.maximum(least, self._end(over, last, ways[_WORST]))
        # What a way promises at best is as good as certain: differences below that never matter.
        worst = ways[_WORST] if ticks.slowdown else torch.maximum(ways[_WORST], least)
        # Nor does it matter since when the link is free, before the next message can be filled.
        if more and more[0].after == end:
            soonest = now + (more[0].ready - chain.ready[end - 1] + more[0].filling)
        elif end < len(chain.ready):
            soonest = now + (chain.ready[end] - chain.ready[end - 1] + ticks.start + chain.pack[end])
        else:
            free = soonest = torch.zeros_like(now)
        free = torch.maximum(free, soonest)
        busy = torch.maximum(busy, now) if ticks.slowdown else torch.zeros_like(now)
        order = torch.stack([now, free, busy, worst])
        promising = least < self.bound
        ways, order, least = ways[:, promising], order[:, promising], least[promising]
        kept: list[torch.Tensor] = []
        score = order.sum(0)
        left = torch.arange(order.shape[1], device="cpu")
        while len(left) and len(kept) < self.most:
            # Nothing beats the one that promises most, or if several do, the one of them with the least sum.
            best = left[torch.where(least[left] == least[left].min(), score[left], torch.inf).argmin()]
            kept.append(best)
            left = left[(order[:, left] < order[:, best, None]).any(0)]
        self.dropped |= len(left) > 0
        if not kept:
            return ways[:, :0]
        chosen = torch.stack(kept)
        found = ways[:, chosen].clone()
        first = len(self.history)
        self.history.extend((end, int(way)) for way in found[_ID].tolist())
        found[_ID] = torch.arange(first, first + len(chosen), dtype=torch.float64, device="cpu")
        self.count = max(self.count, len(chosen))
        return found


def _numbers(values: object) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")  # type: ignore[call-overload]
