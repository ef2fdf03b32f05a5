"""A step on two lanes, as a value: what computes when, which messages are under way, and what nobody hides."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fdp.stages import enter

LANES = ("compute", "communication")
KINDS = ("forward", "backward", "pack", "optimizer", "message")


@dataclass(frozen=True)
class Interval:
    """Something that takes time on one lane.

    Attributes:
        lane: "compute" or "communication".
        kind: "forward", "backward", "pack" (filling buckets and starting messages), "optimizer" (whatever follows a
            wait), or "message".
        name: an operator with its source line, or what travels.
        start_s: seconds from the beginning of the step.
        end_s: likewise.
        bucket: index of the bucket that it is, fills or waits for; None if there is none.
        size_bytes: bytes that travel, of a message; else None.
    """

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    bucket: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step on a compute and a communication lane, as simulated or as measured.

    Intervals of one lane are sorted by start; those of the compute lane do not overlap. Messages may (several in
    flight). Where the compute lane has no interval, it waits for messages.

    Attributes:
        name: the user's function.
        world_size: number of ranks.
        origin: "simulated" or "measured".
        intervals: all of both lanes.
        step_s: seconds of the whole step.
    """

    name: str
    world_size: int
    origin: str
    intervals: tuple[Interval, ...]
    step_s: float

    def draw(self, path: str | os.PathLike[str] | None = None, *, beside: Timeline | None = None) -> Any:
        """Draw both lanes: buckets in colours, what computes named, what nobody hides hatched.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.
            beside: another timeline to draw below this one, on the same axis of time.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        return enter("draw", self, path, beside)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open, with arrows from messages to waits.

        Args:
            path: the file to write, JSON of Chrome's Trace Event Format; times are in microseconds.
        """
        enter("save_trace", self, path)

    def __str__(self) -> str:
        return str(enter("print_timeline", self))
