"""Cut a chain of gradients into buckets such that the step ends as early as it can: dynamic programming, exactly.

A way to cut the first gradients is known by a few numbers: when the compute lane has filled the last bucket, when the
link is free again, and how late the optimizer ends because of what was sent. One way that is no worse in all of them
is no worse whatever follows; so of each prefix only ways are kept that no other one beats, and only those that can
still beat the best plan known. A way also beats ways to cut a shorter prefix, if it has done more by then at no cost.

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
"""Ways to cut a prefix that are kept. Were there more, those that promise least would be dropped, and that be said."""

_QUICK_WAYS, _QUICK_OPEN = 8, 24
"""The same in a quick search, and how many shorter prefixes it goes on from. It finds an end by which to judge all
others; and where messages slow computing down it is all there is. Then every message that is sent earlier or later
leaves another time behind, and hardly any way beats another in everything."""

_DIVES = 8
"""Ways that are followed before, the most promising each time, for a first such end."""

_PATIENCE = 60_000
"""After so many buckets tried in all, the full search gives up, and that is said."""

_FEW_FIXED = 8
"""With no more buckets of other kinds than these, what they wait for is looked at in full."""


@dataclass(frozen=True)
class Cuts:
    """Where a chain is cut.

    Attributes:
        ends: for each bucket, how many links come before its end; empty if nothing ends before the bound.
        end: when the step ends, in nanoseconds.
        tried: how many buckets were tried, as the end of some way to cut what comes before.
        proven: whether nothing ends earlier.
    """

    ends: tuple[int, ...]
    end: float
    tried: int
    proven: bool


@dataclass(slots=True)
class _Way:
    """A way to cut a prefix.

    Attributes:
        cut: how many links the prefix has.
        before: the way that it goes on from.
        now: until when the compute lane is busy.
        work: of the body, done by then.
        free: when the link takes the next message.
        busy: until when messages are under way.
        worst: how much work the step ends behind, because of the messages so far.
        least: the earliest end of the step that is still possible.
    """

    cut: int
    before: _Way | None
    now: float
    work: float
    free: float
    busy: float
    worst: float
    least: float


def best_cuts(chain: Chain, ticks: Ticks, bound: float) -> Cuts:
    """Find the buckets with which a step ends earliest.

    A quick search, linear in the number of links, looks for a good end; a full one then looks for a better one, or
    shows that there is none. Where buckets of other kinds are in between, that one looks at all ways that no other
    one beats, and gives up where there are too many. Where there are none it goes by the number of buckets, and
    takes hardly more time for each than there are links (see `layers`): at most quadratic in all.

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
    ends, way = list[int](), best
    while way is not None and way.before is not None:
        ends.append(way.cut)
        way = way.before
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
        self.travel = list(itertools.accumulate(chain.travel, initial=0.0))
        self.packed = list(itertools.accumulate(chain.pack, initial=0.0))
        self.after = [fixed.after for fixed in chain.fixed]
        filling = [fixed.filling for fixed in reversed(chain.fixed)]
        self.filling_left = list(itertools.accumulate(filling, initial=0.0))[::-1]
        count = len(chain.ready)
        self.next_read = chain.next_read()
        # No plan is faster than its bytes: those from some link on leave only when that link is ready.
        self.latest = [-math.inf] * (count + 1)
        for link in range(count - 1, -1, -1):
            left = self.travel[-1] - self.travel[link]
            self.latest[link] = max(self.latest[link + 1], chain.ready[link] + left)
        self.last_behind = self.total - chain.tail[-2][-1] if chain.read[-1] else 0.0

    def dive(self) -> _Way | None:
        """Follow the most promising ways to the end, some of them; lowers the bound."""
        chain, count = self.chain, len(self.chain.ready)
        best: _Way | None = None
        number = itertools.count()  # ties are broken by what comes first
        heap: list[tuple[float, int, int, _Way]] = [(0.0, 0, next(number), self._nothing())]
        for _ in range(_DIVES):
            if not heap or heap[0][0] >= self.bound:
                break
            way = heapq.heappop(heap)[-1]
            events = bisect.bisect_left(self.after, way.cut)
            for end in range(way.cut + 1, count + 1):
                while events < len(chain.fixed) and chain.fixed[events].after < end:
                    way = self._pass(way, events)
                    events += 1
                if way.cut < chain.not_with[end - 1]:
                    break
                longer = self._extend(way, end, events)
                if way.least >= self.bound:
                    break
                if end == count:
                    best = self._finish(longer, events) or best
                elif longer.least < self.bound:
                    heapq.heappush(heap, (longer.least, -end, next(number), longer))
        return best

    def run(self, quick: bool) -> _Way | None:
        """Search among all, or most; lowers the bound. None if nothing ends before it."""
        chain, count = self.chain, len(self.chain.ready)
        self.dropped = False
        opened = [self._nothing()]
        events = 0
        for end in range(1, count + 1):
            while events < len(chain.fixed) and chain.fixed[events].after < end:
                opened = [self._pass(way, events) for way in opened]
                events += 1
            extended, going = [], []
            for way in opened:
                if way.cut < chain.not_with[end - 1]:
                    continue
                longer = self._extend(way, end, events)
                if way.least < self.bound:
                    going.append(way)
                    if longer.least < self.bound:
                        extended.append(longer)
            kept = self._unbeaten(extended, events, _QUICK_WAYS if quick else _MOST_WAYS)
            going = [way for way in going if not any(self._overtakes(k, way, events) for k in kept)]
            if quick and len(going) > _QUICK_OPEN:
                self.dropped = True
                going = sorted(going, key=lambda way: (way.least, -way.cut))[:_QUICK_OPEN]
            if not quick and self.tried > _PATIENCE:
                self.dropped = True
                return None
            opened = going + kept
            if not opened:
                return None
        best: _Way | None = None
        for way in opened:
            if way.cut == count:
                best = self._finish(way, events) or best
        return best

    def _nothing(self) -> _Way:
        return _Way(0, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def _finish(self, way: _Way, events: int) -> _Way | None:
        """Take a way to cut the whole chain to the end of the step; lowers the bound, or is None."""
        last = way
        for number in range(events, len(self.chain.fixed)):
            last = self._pass(last, number)
        end = self._end(self._advance(last.now, self.chain.body - last.work, last.busy), last.busy, last.worst)
        if end >= self.bound:
            return None
        self.bound = end
        return way

    def _advance(self, now: float, work: float, busy: float) -> float:
        """When the compute lane has done some work."""
        if self.speed == 1:
            return now + work
        slow = min(max(busy - now, 0.0), work / self.speed)
        return now + (slow + (work - slow * self.speed))

    def _end(self, now: float, busy: float, worst: float) -> float:
        """When a step ends whose body ends at `now`."""
        return max(self.speed * now + self.total, worst) + self.ticks.slowdown * max(now, busy)

    def _pass(self, way: _Way, number: int) -> _Way:
        """Let a bucket of another kind start."""
        fixed: Fixed = self.chain.fixed[number]
        now = self._advance(way.now, fixed.ready - way.work, way.busy)
        now = self._advance(now, fixed.filling, way.busy)
        begin = max(now, way.free)
        done = begin + fixed.whole
        behind = self.total - self.chain.tail[way.cut][number] if fixed.read else 0.0
        worst = max(way.worst, self.speed * done + behind)
        free, busy = begin + fixed.occupied, max(way.busy, done)
        return _Way(way.cut, way.before, now, fixed.ready, free, busy, worst, way.least)

    def _extend(self, way: _Way, end: int, events: int) -> _Way:
        """Close a bucket at `end`, and see how early the way before it can still end with that end or a later one."""
        self.tried += 1
        chain, cut = self.chain, way.cut
        ready = chain.ready[end - 1]
        now = self._advance(way.now, ready - way.work, way.busy)
        now = self._advance(now, self.ticks.start + (self.packed[end] - self.packed[cut]), way.busy)
        begin = max(now, way.free)
        whole, occupied = self.ticks.message(chain.op, self.travel[end] - self.travel[cut])
        done = begin + whole
        free, busy = begin + occupied, max(way.busy, done)
        read = self.next_read[cut] < end
        worst = max(way.worst, self.speed * done + (self.total - chain.tail[cut][events] if read else 0.0))
        # With a later end this bucket is done no earlier, and all bytes from its first on come after `begin`.
        least = begin + self.travel[-1] - self.travel[cut] + self.latency + self.last_behind
        certain = self.total - chain.tail[cut][-1] if read else 0.0
        way.least = max(way.least, least, self.speed * done + certain + self.ticks.slowdown * done)
        # So much is left of this one.
        left = self.packed[-1] - self.packed[end] + self.filling_left[events]
        least, last, slow = way.least, busy, max(busy - now, 0.0)
        if end < len(chain.ready):
            left += self.ticks.start
            slow = max(slow, max(free - now, 0.0) + self.latency + self.travel[-1] - self.travel[end])
            own = max(free + self.travel[-1] - self.travel[end], now + self.latest[end] - ready + self.ticks.start)
            own += self.latency
            least = max(least, own + self.last_behind)
            last = max(last, own)
        over = now + chain.body - ready + left
        least = max(least, self._end(over, last, worst))
        if self.ticks.slowdown:  # every message is done before the step is, and slows something down
            least = max(least, over + self.total + self.ticks.slowdown * slow)
        return _Way(end, way, now, ready, free, busy, worst, least)

    def _soonest(self, way: _Way, events: int) -> float:
        """When the next message can begin, at the earliest, on a link that is free."""
        chain, end = self.chain, way.cut
        if events < len(chain.fixed) and chain.fixed[events].after == end:
            following = chain.fixed[events]
            return way.now + following.ready - way.work + following.filling
        if end < len(chain.ready):
            return way.now + chain.ready[end] - way.work + self.ticks.start + chain.pack[end]
        return math.inf

    def _unbeaten(self, ways: list[_Way], events: int, most: int) -> list[_Way]:
        """Keep ways to cut one prefix that no other one beats whatever follows."""
        slowed = bool(self.ticks.slowdown)
        # It does not matter since when the link is free, before the next message can be filled.
        free = {id(way): max(way.free, self._soonest(way, events)) for way in ways}
        kept: list[_Way] = []
        # A way that promises more, and is ahead on both lanes, ends no later: what its messages so far hold up is
        # within what it promises, and that the other one does not end before.
        for way in sorted(ways, key=lambda way: (way.least, way.now, free[id(way)])):
            if any(
                other.now <= way.now
                and free[id(other)] <= free[id(way)]
                and (not slowed or (other.busy <= max(way.busy, way.now) and other.worst <= way.worst))
                for other in kept
            ):
                continue
            if len(kept) == most:
                self.dropped = True
                break
            kept.append(way)
        return kept

    def _overtakes(self, way: _Way, other: _Way, events: int) -> bool:
        """Whether a way beats one to cut a shorter prefix, whatever follows."""
        end, chain = way.cut, self.chain
        if end == len(chain.ready) or way.least > other.least:
            return False
        # Both lanes, when any bucket that ends later has been filled: it takes this way fewer bytes.
        delay = way.now - way.work - self.packed[end]
        if self.ticks.slowdown:
            # Not certain: as if every byte that was sent had slowed computing down already.
            delay -= self.ticks.slowdown * self.travel[end]
            if delay > other.now - other.work - self.packed[other.cut] - self.ticks.slowdown * self.travel[other.cut]:
                return False
        elif delay > other.now - other.work - self.packed[other.cut]:
            return False
        if not self.loose and events < len(chain.fixed) and way.now > other.now + way.work - other.work:
            return False  # a bucket of another kind would start later
        if way.free > self._soonest(way, events):
            # Messages of more bytes differ by no less than messages of few, by which these two are compared.
            _, mine = self.ticks.message(chain.op, chain.travel[end])
            _, theirs = self.ticks.message(chain.op, self.travel[end + 1] - self.travel[other.cut])
            rounding = 0.0 if self.ticks.in_flight == 1 or mine == chain.travel[end] else 1.0
            if way.free + mine + rounding > other.free + theirs:
                return False
            if not self.loose and events < len(chain.fixed) and way.free > other.free:
                return False
        self.dropped |= self.loose
        return True
