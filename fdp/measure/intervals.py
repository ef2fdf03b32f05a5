"""From stamps of one run to the intervals of its two lanes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from fdp.emit.codegen.lines import ProgramPart
from fdp.measure.clock import Clock
from fdp.plan import Plan, Run, Start, Wait
from fdp.plan.simulate import buckets_released, message_name, operation_label, phases
from fdp.timeline.timeline import Interval


@dataclass(frozen=True)
class Event:
    """Something that happened to a message.

    Attributes:
        what: "starts", "started", "arrived", "is waited for" or "was waited for".
        bucket: whose message it is.
        second: when, from the beginning of the step.
    """

    what: str
    bucket: int
    second: float


class EventRecorder:
    """Records the events of a run's messages, each with a time stamp."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stamps: list[tuple[str, int, Any]] = []

    def around_start(self, start: Callable[[int], None]) -> Callable[[int], None]:
        return self._around(start, "starts", "started")

    def around_wait(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        return self._around(wait, "is waited for", "was waited for")

    def arrived(self, index: int) -> None:
        self._stamps.append(("arrived", index, self._clock.stamp()))

    def _around(self, call: Callable[[int], None], before: str, after: str) -> Callable[[int], None]:
        def around(index: int, *into: Any) -> None:
            self._stamps.append((before, index, self._clock.stamp()))
            call(index, *into)
            self._stamps.append((after, index, self._clock.stamp()))

        return around

    def events(self, first: object) -> list[Event]:
        """All events in order; times are those since the stamp `first`."""
        stamps = list(self._stamps)
        seconds = self._clock.seconds(first, [stamp for _, _, stamp in stamps])
        found = [Event(what, bucket, second) for (what, bucket, _), second in zip(stamps, seconds, strict=True)]
        return sorted(found, key=lambda event: event.second)


def operations(plan: Plan, parts: Sequence[ProgramPart], seconds: Sequence[float]) -> list[Interval]:
    """The compute lane of a step that runs operator by operator.

    Args:
        plan: that it carries out.
        parts: of its program.
        seconds: of the ticks of the program, one more than there are parts, and of the end of the step.

    Returns:
        An interval an operation, without a gap but for waits: what it takes to enter the program and to leave it is
        there as well.
    """
    kinds = phases(plan.trace.operations)
    found = [Interval("compute", "forward", "call", 0.0, seconds[0])]
    waited: int | None = None
    for part, (start_s, end_s) in zip(parts, itertools.pairwise(seconds[:-1]), strict=True):
        if part.kind == "wait":
            waited = part.index
            continue
        if part.kind == "run":
            kind, name, bucket = _work(plan, kinds, part.index, waited)
        else:
            kind, name, bucket = "pack", f"pack bucket {part.index}", part.index
        last = found[-1]
        if kind == "pack" and (last.kind, last.bucket, last.end_s) == (kind, bucket, start_s):
            found[-1] = Interval("compute", kind, name, last.start_s, end_s, bucket)
        else:
            found.append(Interval("compute", kind, name, start_s, end_s, bucket))
    return [*found, Interval("compute", "optimizer", "return", seconds[-2], seconds[-1], waited)]


def _work(plan: Plan, kinds: Sequence[str], at: int, waited: int | None) -> tuple[str, str, int | None]:
    """Kind, name and bucket of the work of a program for one item of its schedule."""
    item = plan.schedule[at] if at >= 0 else None
    if isinstance(item, Run):
        kind = kinds[item.operations[0]]
        name = operation_label(plan.trace.operations[item.operations[0]], len(item.operations))
        return kind, name, waited if kind == "optimizer" else None
    if isinstance(item, Start):
        # Of a message that is not sent: there is one rank, or there are no elements.
        return "pack", f"pack bucket {item.bucket}", item.bucket
    return ("forward", "copy", None) if item is None else ("optimizer", "copy", waited)


def intervals_between_events(plan: Plan, events: Sequence[Event], end_s: float) -> list[Interval]:
    """The compute lane of a compiled step: an interval from one start or wait to the next.

    Args:
        plan: that it carries out; what lies between the same two messages there tells the kind of a block.
        events: of its messages.
        end_s: when the step ended.

    Returns:
        The intervals. A block that is partly forward and partly backward counts as backward.
    """
    sent = {("start" if event.what == "starts" else "wait", event.bucket) for event in events}
    kinds = _kinds_before(plan, sent)
    found: list[Interval] = []
    now, begin_s, waited = 0.0, 0.0, None
    for event in events:
        if event.what in ("starts", "is waited for"):
            kind = kinds["start" if event.what == "starts" else "wait", event.bucket]
            name = f"until bucket {event.bucket} {event.what}"
            found.append(Interval("compute", kind, name, now, event.second, waited if kind == "optimizer" else None))
            begin_s = event.second
        elif event.what == "started":
            name = f"start bucket {event.bucket}"
            found.append(Interval("compute", "pack", name, begin_s, event.second, event.bucket))
            now = event.second
        elif event.what == "was waited for":
            now, waited = event.second, event.bucket
    return [*found, Interval("compute", kinds["end", -1], "until the end", now, end_s, waited)]


def _kinds_before(plan: Plan, sent: Container[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The kind of work in a schedule before each recorded start and wait, back to the previous one."""
    kinds = phases(plan.trace.operations)
    found: dict[tuple[str, int], str] = {}
    since: set[str] = set()
    last = "forward"
    for item in (*plan.schedule, None):
        if isinstance(item, Run):
            if not plan.trace.operations[item.operations[0]].view:
                since.add(kinds[item.operations[0]])
            continue
        key = ("end", -1) if item is None else ("wait" if isinstance(item, Wait) else "start", item.bucket)
        if item is not None and key not in sent:
            continue
        found[key] = last = next((kind for kind in ("backward", "optimizer", "forward") if kind in since), last)
        since.clear()
    return found


def messages(plan: Plan, events: Sequence[Event]) -> list[Interval]:
    """The communication lane: each message from its start until it arrived, or until its wait was over."""
    started = {event.bucket: event.second for event in events if event.what == "started"}
    ended: dict[int, float] = {}
    for event in events:
        if event.what in ("arrived", "was waited for"):
            # Whichever was seen first: a thread that tells of an arrival may have to wait for its turn.
            ended.setdefault(event.bucket, event.second)
    over = {event.bucket: event.second for event in events if event.what == "was waited for"}
    used = {bucket: over[last] for last, let in buckets_released(plan).items() if last in over for bucket in let}
    found = [
        Interval(
            "communication", "message", message_name(plan.trace, plan.buckets[bucket]),
            min(second, ended[bucket]), ended[bucket], bucket, plan.buckets[bucket].size_bytes,
            used.get(bucket),
        )
        for bucket, second in started.items()
    ]  # fmt: skip
    return sorted(found, key=lambda interval: interval.start_s)
