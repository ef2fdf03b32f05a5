"""Read off a timeline what a table or a picture shows of it: waits, bars of one kind, rows of messages.

A timeline has one interval for each operator, thousands for a large model. A person looks for less: which stretch is
forward, where the rank waits and for which bucket, and what of a message is exposed.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fdp.timeline.timeline import Interval, Timeline


@dataclass(frozen=True)
class Bar:
    """Neighbours on the compute lane that are of one kind, and of one bucket.

    Attributes:
        kind: as of an `Interval`, or "wait" where the compute lane has nothing to do.
        bucket: the bucket that they pack or wait for; None if there is none, or if it was not asked for.
        start_s: seconds from the beginning of the step.
        end_s: likewise.
    """

    kind: str
    bucket: int | None
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


def waits(timeline: Timeline) -> tuple[Bar, ...]:
    """Where the compute lane waits, and for which bucket: the one whose message ends last before computing goes on.

    Example:
        >>> work = Interval("compute", "backward", "mm", 0.0, 2.0)
        >>> sent = Interval("communication", "message", "w", 1.0, 5.0, bucket=0)
        >>> waits(Timeline("step", 2, "simulated", (work, sent), 5.0))
        (Bar(kind='wait', bucket=0, start_s=2.0, end_s=5.0),)
    """
    messages = sorted(timeline.messages, key=lambda message: message.end_s)
    ends = [message.end_s for message in messages]
    found = []
    at = 0.0
    for start_s, end_s in [*((i.start_s, i.end_s) for i in timeline.compute), (timeline.step_s,) * 2]:
        if start_s > at:
            # A measured wait returns a little after the message is done; a simulated one in the same moment, save
            # for rounding.
            last = bisect.bisect_right(ends, start_s + 1e-9 * timeline.step_s) - 1
            found.append(Bar("wait", messages[last].bucket if last >= 0 else None, at, start_s))
        at = max(at, end_s)
    return tuple(found)


def used(timeline: Timeline) -> dict[int | None, float]:
    """When the compute lane continues with each bucket that is read.

    A timeline that does not tell has the first interval of the optimizer that a bucket leads to.
    """
    found = {i.bucket: i.start_s for i in reversed(timeline.compute) if i.kind == "optimizer"}
    return found | {m.bucket: m.used_s for m in timeline.messages if m.used_s is not None}


def bars_of(intervals: Iterable[Interval], finest_s: float = 0.0, by_bucket: bool = True) -> tuple[Bar, ...]:
    """Join neighbours of one kind.

    Args:
        intervals: of the compute lane, in order.
        finest_s: neighbours that are no more than so many seconds apart are joined.
        by_bucket: whether those of different buckets stay apart.

    Returns:
        The bars, in order.
    """
    found: list[Bar] = []
    for i in intervals:
        last, bucket = found[-1] if found else None, i.bucket if by_bucket else None
        if last and (last.kind, last.bucket) == (i.kind, bucket) and i.start_s - last.end_s <= finest_s:
            found[-1] = Bar(i.kind, bucket, last.start_s, max(last.end_s, i.end_s))
        else:
            found.append(Bar(i.kind, bucket, i.start_s, i.end_s))
    return tuple(found)


def rows(messages: Sequence[Interval], most: int) -> tuple[int, ...]:
    """Give each message a row, so that those of one row do not overlap as long as `most` rows suffice.

    Args:
        messages: sorted by start.
        most: the number of rows that there may be; beyond, a message goes where the last one ends first.

    Returns:
        The row of each, from 0.
    """
    free: list[tuple[float, int]] = []
    found = []
    for message in messages:
        # Two that touch may overlap by a rounding error.
        if len(free) < most and (not free or free[0][0] > message.start_s + 1e-9 * abs(message.start_s)):
            row = len(free)
        else:
            row = heapq.heappop(free)[1]
        heapq.heappush(free, (message.end_s, row))
        found.append(row)
    return tuple(found)


def shared_s(one: Bar | Interval, others: Iterable[Bar]) -> float:
    """Seconds of one stretch that lie in others, which do not overlap each other."""
    return sum(max(0.0, min(one.end_s, o.end_s) - max(one.start_s, o.start_s)) for o in others)


def parts_without(one: Bar, others: Iterable[Bar]) -> tuple[Bar, ...]:
    """What is left of a bar if others are taken out of it.

    Args:
        one: the bar.
        others: sorted by start; they do not overlap each other.

    Returns:
        The parts, in order.

    Example:
        >>> parts = parts_without(Bar("optimizer", None, 0.0, 4.0), [Bar("wait", 0, 1.0, 3.0)])
        >>> [(part.start_s, part.end_s) for part in parts]
        [(0.0, 1.0), (3.0, 4.0)]
    """
    found, at = [], one.start_s
    for other in others:
        if other.end_s > at and other.start_s < one.end_s:
            if other.start_s > at:
                found.append(Bar(one.kind, one.bucket, at, other.start_s))
            at = max(at, other.end_s)
    if at < one.end_s:
        found.append(Bar(one.kind, one.bucket, at, one.end_s))
    return tuple(found)


def hidden_s(message: Interval, idle: Iterable[Bar]) -> float:
    """Seconds of a message during which the compute lane does not wait.

    Args:
        message: of the communication lane.
        idle: the waits of its timeline.
    """
    return message.end_s - message.start_s - shared_s(message, idle)
