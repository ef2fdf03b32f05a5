"""Cut a chain of gradients into buckets such that the step ends as early as it can: dynamic programming, exactly.

A partial solution is a way to cut the first gradients. Only three numbers of it matter later: when the compute lane has
packed the last bucket, when the link is free again, and the end of the optimizer that the messages so far cause. One
that is no worse in any of them dominates another. Of each prefix only the Pareto front is kept, and of it only what can
still beat the best plan known. A partial solution also dominates those of a shorter prefix, if it has done more by then
at no cost.

References: Shi, Chu and Li, MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms
(INFOCOM 2019), section IV, merges gradients under latency and bandwidth. Here messages also cost time on the compute
lane, may overlap, may slow computing down, and the optimizer runs between waits.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass

from fdp.plan.cost.ticks import Ticks
from fdp.plan.search.chain import Chain, Fixed
from fdp.plan.search.layers import Layers

_MOST_WAYS = 32
"""Partial solutions that are kept for a prefix. Of more, the least promising are dropped, and the result says so."""

_QUICK_WAYS, _QUICK_OPEN = 8, 24
"""The same in a quick search, and how many shorter prefixes it goes on from. It finds an end by which to judge all
others; and where messages slow computing down it is all there is. Then every message that is sent earlier or later
leaves another time behind, and hardly any partial solution dominates another."""

_DIVES = 8
"""The number of dives: greedy runs that give a first bound."""

_PATIENCE = 60_000
"""After so many buckets tried in all, the full search gives up, and the result says so."""

_FEW_FIXED = 8
"""Up to so many buckets of other kinds, what they wait for is computed exactly."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of a chain into buckets.

    Attributes:
        ends: for each bucket, how many links come before its end; empty if nothing ends before the bound.
        end: when the step ends, in nanoseconds.
        tried: how many buckets were tried, as the end of some partial solution of what comes before.
        proven: whether nothing ends earlier.
    """

    ends: tuple[int, ...]
    end: float
    tried: int
    proven: bool


@dataclass(slots=True)
class _Partial:
    """A partial solution: cuts of a prefix.

    Attributes:
        cut: how many links the prefix has.
        before: the partial solution that it goes on from.
        now: until when the compute lane is busy.
        work: of the body, done by then.
        free: when the link takes the next message.
        busy: until when messages are under way.
        worst: how much work the step ends behind, because of the messages so far.
        least: the earliest end of the step that is still possible.
    """

    cut: int
    before: _Partial | None
    now: float
    work: float
    free: float
    busy: float
    worst: float
    least: float


def best_cuts(chain: Chain, ticks: Ticks, bound: float) -> Cuts:
    """Find the buckets with which a step ends earliest.

    A quick search, linear in the number of links, looks for a good end; a full one then looks for a better one, or
    shows that there is none. Where buckets of other kinds are in between, that one looks at whole Pareto fronts, and
    gives up where there are too many. Where there are none it goes by the number of buckets, and takes hardly more time
    for each than there are links (see `layers`): at most quadratic in all.

    Args:
        chain: of gradients.
        ticks: what messages take.
        bound: an end that is known to be possible, in nanoseconds.

    Returns:
        The cuts, a function of the arguments alone.
    """
    search = _Search(chain, ticks, bound)
    best = search.dive()
    best = search.run(quick=True) or best
    if search.dropped and not ticks.slowdown and not chain.cut_anywhere:
        best = search.run(quick=False) or best
    ends, partial = list[int](), best
    while partial is not None and partial.before is not None:
        ends.append(partial.cut)
        partial = partial.before
    found = Cuts(tuple(reversed(ends)), search.bound, search.tried, not search.dropped)
    if not search.dropped or ticks.slowdown or not chain.cut_anywhere:
        return found
    layers = Layers(chain, ticks)
    while (better := layers.before(found.end)) is not None:
        found = Cuts(*better, found.tried, False)
    return Cuts(found.ends, found.end, found.tried + layers.steps, not layers.gave_up)


class _Search:
    """One pass over the prefixes of a chain, from short to long.

    The optimizer's part is counted in work: a message that is done at t, with V of the tail behind its wait, has the
    step end no earlier than when work (1 - slowdown) t + V is done, at the pace of a compute lane that is slowed down
    until the last message is done, and not after.
    """

    def __init__(self, chain: Chain, ticks: Ticks, bound: float) -> None:
        self.chain, self.ticks, self.bound = chain, ticks, bound
        self.speed = 1 - ticks.slowdown
        self.loose = bool(ticks.slowdown) or len(chain.fixed) > _FEW_FIXED
        self.dropped = False
        self.tried = 0
        self.total = chain.tail[-1][-1]
        self.latency = ticks.latency[chain.op]
        self.on_link = list(itertools.accumulate(chain.on_link, initial=0.0))
        self.packed = list(itertools.accumulate(chain.pack, initial=0.0))
        self.after = [fixed.after for fixed in chain.fixed]
        packing = [fixed.packing for fixed in reversed(chain.fixed)]
        self.packing_left = list(itertools.accumulate(packing, initial=0.0))[::-1]
        count = len(chain.ready)
        self.next_read = chain.next_read()
        # No plan is faster than its bytes: those from some link on leave only when that link is ready.
        self.latest = [-math.inf] * (count + 1)
        for link in range(count - 1, -1, -1):
            left = self.on_link[-1] - self.on_link[link]
            self.latest[link] = max(self.latest[link + 1], chain.ready[link] + left)
        self.last_behind = self.total - chain.tail[-2][-1] if chain.read[-1] else 0.0

    def dive(self) -> _Partial | None:
        """Extend the most promising partial solutions greedily to the end, a few times; lowers the bound."""
        chain, count = self.chain, len(self.chain.ready)
        best: _Partial | None = None
        number = itertools.count()  # ties are broken by what comes first
        heap: list[tuple[float, int, int, _Partial]] = [(0.0, 0, next(number), self._nothing())]
        for _ in range(_DIVES):
            if not heap or heap[0][0] >= self.bound:
                break
            partial = heapq.heappop(heap)[-1]
            events = bisect.bisect_left(self.after, partial.cut)
            for end in range(partial.cut + 1, count + 1):
                while events < len(chain.fixed) and chain.fixed[events].after < end:
                    partial = self._pass(partial, events)
                    events += 1
                if partial.cut < chain.not_with[end - 1]:
                    break
                longer = self._extend(partial, end, events)
                if partial.least >= self.bound:
                    break
                if end == count:
                    best = self._finish(longer, events) or best
                elif longer.least < self.bound:
                    heapq.heappush(heap, (longer.least, -end, next(number), longer))
        return best

    def run(self, quick: bool) -> _Partial | None:
        """Search all partial solutions, or most if quick; lowers the bound. None if nothing ends before it."""
        chain, count = self.chain, len(self.chain.ready)
        self.dropped = False
        opened = [self._nothing()]
        events = 0
        for end in range(1, count + 1):
            while events < len(chain.fixed) and chain.fixed[events].after < end:
                opened = [self._pass(partial, events) for partial in opened]
                events += 1
            extended, going = [], []
            for partial in opened:
                if partial.cut < chain.not_with[end - 1]:
                    continue
                longer = self._extend(partial, end, events)
                if partial.least < self.bound:
                    going.append(partial)
                    if longer.least < self.bound:
                        extended.append(longer)
            kept = self._pareto_front(extended, events, _QUICK_WAYS if quick else _MOST_WAYS)
            going = [partial for partial in going if not any(self._dominates(k, partial, events) for k in kept)]
            if quick and len(going) > _QUICK_OPEN:
                self.dropped = True
                going = sorted(going, key=lambda partial: (partial.least, -partial.cut))[:_QUICK_OPEN]
            if not quick and self.tried > _PATIENCE:
                self.dropped = True
                return None
            opened = going + kept
            if not opened:
                return None
        best: _Partial | None = None
        for partial in opened:
            if partial.cut == count:
                best = self._finish(partial, events) or best
        return best

    def _nothing(self) -> _Partial:
        return _Partial(0, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def _finish(self, partial: _Partial, events: int) -> _Partial | None:
        """The end of a step whose whole chain is cut; lowers the bound. None if it does not end before it."""
        last = partial
        for number in range(events, len(self.chain.fixed)):
            last = self._pass(last, number)
        end = self._end(self._advance(last.now, self.chain.body - last.work, last.busy), last.busy, last.worst)
        if end >= self.bound:
            return None
        self.bound = end
        return partial

    def _advance(self, now: float, work: float, busy: float) -> float:
        """When the compute lane has finished some work."""
        if self.speed == 1:
            return now + work
        slow = min(max(busy - now, 0.0), work / self.speed)
        return now + (slow + (work - slow * self.speed))

    def _end(self, now: float, busy: float, worst: float) -> float:
        """When a step ends whose body ends at `now`."""
        return max(self.speed * now + self.total, worst) + self.ticks.slowdown * max(now, busy)

    def _pass(self, partial: _Partial, number: int) -> _Partial:
        """Let a bucket of another kind start."""
        fixed: Fixed = self.chain.fixed[number]
        now = self._advance(partial.now, fixed.ready - partial.work, partial.busy)
        now = self._advance(now, fixed.packing, partial.busy)
        begin = max(now, partial.free)
        done = begin + fixed.whole
        behind = self.total - self.chain.tail[partial.cut][number] if fixed.read else 0.0
        worst = max(partial.worst, self.speed * done + behind)
        free, busy = begin + fixed.occupied, max(partial.busy, done)
        return _Partial(partial.cut, partial.before, now, fixed.ready, free, busy, worst, partial.least)

    def _extend(self, partial: _Partial, end: int, events: int) -> _Partial:
        """Close a bucket at `end`; see how early a partial solution can still end with that end or a later one."""
        self.tried += 1
        chain, cut = self.chain, partial.cut
        ready = chain.ready[end - 1]
        now = self._advance(partial.now, ready - partial.work, partial.busy)
        now = self._advance(now, self.ticks.start + (self.packed[end] - self.packed[cut]), partial.busy)
        begin = max(now, partial.free)
        whole, occupied = self.ticks.message(chain.op, self.on_link[end] - self.on_link[cut])
        done = begin + whole
        free, busy = begin + occupied, max(partial.busy, done)
        read = self.next_read[cut] < end
        worst = max(partial.worst, self.speed * done + (self.total - chain.tail[cut][events] if read else 0.0))
        # With a later end this bucket is done no earlier, and all bytes from its first on come after `begin`.
        least = begin + self.on_link[-1] - self.on_link[cut] + self.latency + self.last_behind
        certain = self.total - chain.tail[cut][-1] if read else 0.0
        partial.least = max(partial.least, least, self.speed * done + certain + self.ticks.slowdown * done)
        # So much is left of this one.
        left = self.packed[-1] - self.packed[end] + self.packing_left[events]
        least, last, slow = partial.least, busy, max(busy - now, 0.0)
        if end < len(chain.ready):
            left += self.ticks.start
            slow = max(slow, max(free - now, 0.0) + self.latency + self.on_link[-1] - self.on_link[end])
            own = max(free + self.on_link[-1] - self.on_link[end], now + self.latest[end] - ready + self.ticks.start)
            own += self.latency
            least = max(least, own + self.last_behind)
            last = max(last, own)
        over = now + chain.body - ready + left
        least = max(least, self._end(over, last, worst))
        if self.ticks.slowdown:  # every message is done before the step is, and slows something down
            least = max(least, over + self.total + self.ticks.slowdown * slow)
        return _Partial(end, partial, now, ready, free, busy, worst, least)

    def _soonest(self, partial: _Partial, events: int) -> float:
        """When the next message can begin, at the earliest, on a link that is free."""
        chain, end = self.chain, partial.cut
        if events < len(chain.fixed) and chain.fixed[events].after == end:
            following = chain.fixed[events]
            return partial.now + following.ready - partial.work + following.packing
        if end < len(chain.ready):
            return partial.now + chain.ready[end] - partial.work + self.ticks.start + chain.pack[end]
        return math.inf

    def _pareto_front(self, partials: list[_Partial], events: int, most: int) -> list[_Partial]:
        """Keep the partial solutions of one prefix that no other one dominates."""
        slowed = bool(self.ticks.slowdown)
        # It does not matter since when the link is free, before the next bucket can be packed.
        free = {id(partial): max(partial.free, self._soonest(partial, events)) for partial in partials}
        kept: list[_Partial] = []
        # One that promises more, and is ahead on both lanes, ends no later: what its messages so far hold up is within
        # what it promises, and that the other one does not end before.
        for partial in sorted(partials, key=lambda partial: (partial.least, partial.now, free[id(partial)])):
            if any(
                other.now <= partial.now
                and free[id(other)] <= free[id(partial)]
                and (not slowed or (other.busy <= max(partial.busy, partial.now) and other.worst <= partial.worst))
                for other in kept
            ):
                continue
            if len(kept) == most:
                self.dropped = True
                break
            kept.append(partial)
        return kept

    def _dominates(self, partial: _Partial, other: _Partial, events: int) -> bool:
        """Whether a partial solution dominates one of a shorter prefix."""
        end, chain = partial.cut, self.chain
        if end == len(chain.ready) or partial.least > other.least:
            return False
        # Both lanes, when any bucket that ends later has been packed: it takes fewer bytes then.
        delay = partial.now - partial.work - self.packed[end]
        if self.ticks.slowdown:
            # Not certain: as if every byte that was sent had slowed computing down already.
            delay -= self.ticks.slowdown * self.on_link[end]
            if delay > other.now - other.work - self.packed[other.cut] - self.ticks.slowdown * self.on_link[other.cut]:
                return False
        elif delay > other.now - other.work - self.packed[other.cut]:
            return False
        if not self.loose and events < len(chain.fixed) and partial.now > other.now + partial.work - other.work:
            return False  # a bucket of another kind would start later
        if partial.free > self._soonest(partial, events):
            # Messages of more bytes differ by no less than messages of few, by which these two are compared.
            _, mine = self.ticks.message(chain.op, chain.on_link[end])
            _, theirs = self.ticks.message(chain.op, self.on_link[end + 1] - self.on_link[other.cut])
            rounding = 0.0 if self.ticks.in_flight == 1 or mine == chain.on_link[end] else 1.0
            if partial.free + mine + rounding > other.free + theirs:
                return False
            if not self.loose and events < len(chain.fixed) and partial.free > other.free:
                return False
        self.dropped |= self.loose
        return True
