"""A step on two lanes, as a value: what is computed when, which messages are under way, and what is exposed."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fdp.tables import Printed, count, cut_short, ms, short_name
from fdp.tracebacks import hiding_frames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOLERANCE_S = 1e-10
"""Times that are closer than this are one: no clock tells them apart, and floating-point numbers are rounded."""


@dataclass(frozen=True, repr=False)
class Interval:
    """Something that takes time on one lane.

    Attributes:
        lane: "compute" or "communication".
        kind: "forward", "backward", "pack" (packing buckets and starting messages), "optimizer" (what needs
            a message, or comes behind the last backward pass, and no backward pass needs), or "message".
        name: an operator with its source line, or what is sent.
        start_s: seconds from the beginning of the step.
        end_s: likewise.
        bucket: index of the bucket that it is, packs or waits for; None if there is none.
        size_bytes: bytes that are sent, of a message; else None.
        used_s: of a message, when the compute lane goes on with what it brought; None if nothing reads that, or it
            is not known.
    """

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    bucket: int | None = None
    size_bytes: int | None = None
    used_s: float | None = None

    def __repr__(self) -> str:
        return f"<Interval of {self.kind}, {cut_short(self.name)}: {ms(self.start_s)} to {ms(self.end_s)} ms>"


@dataclass(frozen=True, repr=False)
class Timeline(Printed):
    """One step on a compute and a communication lane, as simulated or as measured.

    Intervals of one lane are sorted by start; those of the compute lane do not overlap. Messages may (several in
    flight). Where the compute lane has no interval, it waits for messages.

    Attributes:
        name: the user's function.
        world_size: number of ranks.
        origin: "simulated" or "measured".
        intervals: all of both lanes.
        step_s: seconds of the whole step.
        alone_s: seconds that a single rank would take for the same work, without buckets and messages; None if
            that is not known.
    """

    name: str
    world_size: int
    origin: str
    intervals: tuple[Interval, ...]
    step_s: float
    alone_s: float | None = None

    @property
    def compute(self) -> tuple[Interval, ...]:
        """The intervals of the compute lane."""
        return tuple(interval for interval in self.intervals if interval.lane == "compute")

    @property
    def messages(self) -> tuple[Interval, ...]:
        """The intervals of the communication lane."""
        return tuple(interval for interval in self.intervals if interval.lane == "communication")

    @property
    def compute_s(self) -> float:
        """Seconds in which the compute lane does the step's own work, slowed down by messages or not."""
        return sum(interval.end_s - interval.start_s for interval in self.compute if interval.kind != "pack")

    @property
    def pack_s(self) -> float:
        """Seconds in which the compute lane packs buckets and starts messages."""
        return sum(interval.end_s - interval.start_s for interval in self.compute if interval.kind == "pack")

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one message is under way."""
        return sum(end - start for start, end in _union(self.messages))

    @property
    def exposed_s(self) -> float:
        """Seconds in which messages are under way while the compute lane has nothing to do."""
        return self.communication_s - self.hidden_s

    @property
    def hidden_s(self) -> float:
        """Seconds in which messages are under way while the compute lane is busy."""
        busy = _union(self.compute)
        begins = [start for start, _ in busy]
        total = 0.0
        for start, end in _union(self.messages):
            for other_start, other_end in busy[max(bisect.bisect_right(begins, start) - 1, 0) :]:
                if other_start >= end:
                    break
                total += max(min(end, other_end) - max(start, other_start), 0.0)
        return total

    @property
    def efficiency(self) -> float:
        """The work of a rank in a second, as a share of its work when alone: 1 is perfect (weak) scaling."""
        alone_s = self.compute_s if self.alone_s is None else self.alone_s
        return alone_s / self.step_s if self.step_s else 1.0

    @property
    def critical_path(self) -> tuple[Interval, ...]:
        """The critical path from the beginning of the step to its end: if a part of it gets shorter, so does the step.

        The path changes lanes where a message is what the compute lane waits for, and where a message waits for the
        bucket to be packed. An interval of which the path takes a part (of a message, until it lets the next one onto
        the link) is in it with that part alone. Of a simulated step the path has no gaps; of a measured one it leaves
        out seconds in which nothing was recorded.
        """
        compute, messages = self.compute, self.messages
        ends = [interval.end_s for interval in compute]
        packed_s = {interval.bucket: interval.end_s for interval in compute if interval.kind == "pack"}
        path: list[Interval] = []
        now, message = self.step_s, -1  # the index of a message that has just been gone back through
        while now > _TOLERANCE_S:
            if message >= 0:
                packed, earlier = packed_s.get(messages[message].bucket, 0.0), message - 1
                message = -1
                if packed < now - _TOLERANCE_S and earlier >= 0 and messages[earlier].end_s >= now - _TOLERANCE_S:
                    # The link was taken when the bucket was packed: by the message before.
                    message = earlier
                    now = _take(path, messages[message], now)
                    continue
            at = bisect.bisect_left(ends, now - _TOLERANCE_S)
            if at < len(compute) and compute[at].start_s < now - _TOLERANCE_S:
                now = _take(path, compute[at], now)
                continue
            # The compute lane waits: for the message that ends when it goes on.
            under_way = [k for k, m in enumerate(messages) if m.start_s < now - _TOLERANCE_S <= m.end_s]
            if under_way:
                message = min(under_way, key=lambda k: (messages[k].end_s, k))
                now = _take(path, messages[message], now)
                continue
            now = max((i.end_s for i in self.intervals if i.end_s < now - _TOLERANCE_S), default=0.0)
        return tuple(reversed(path))

    @hiding_frames
    def draw(self, path: str | os.PathLike[str] | None = None, *, beside: Timeline | None = None) -> Figure:
        """Draw both lanes: buckets in colours, work with its name, exposed time hatched.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.
            beside: another timeline to draw below this one, on the same axis of time.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        from fdp.timeline.picture import draw

        return draw(self, path, beside)

    @hiding_frames
    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open, with arrows from messages to waits.

        Args:
            path: the file to write, JSON of Chrome's Trace Event Format; times are in microseconds.
        """
        from fdp.timeline.perfetto import save_trace

        save_trace(self, path)

    def __repr__(self) -> str:
        messages, ranks = count(len(self.messages), "message"), count(self.world_size, "rank")
        return f"<Timeline of {short_name(self.name)}: {ms(self.step_s)} ms a step, {messages}, {ranks}>"

    def __str__(self) -> str:
        from fdp.timeline.report import print_timeline

        return print_timeline(self)


def _take(path: list[Interval], interval: Interval, until_s: float) -> float:
    """Put an interval, or its part up to a time, on the path; returns when it starts."""
    path.append(interval if interval.end_s <= until_s + _TOLERANCE_S else replace(interval, end_s=until_s))
    return interval.start_s


def _union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """The times that are in any interval, as pieces that do not touch."""
    pieces: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start_s):
        if pieces and interval.start_s <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(pieces[-1][1], interval.end_s))
        else:
            pieces.append((interval.start_s, interval.end_s))
    return pieces
