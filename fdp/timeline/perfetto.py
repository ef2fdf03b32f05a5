"""Write a timeline as a trace that Perfetto and chrome://tracing open.

The format is that of Chrome's Trace Event Format: complete events ("X") with microseconds, metadata ("M") that names
the lanes, and flow events ("s", "f") for the arrow from a message to the wait that it ends.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from fdp.timeline.rows import rows, used, waits
from fdp.timeline.timeline import Timeline

_COMPUTE, _FIRST_MESSAGE_ROW = 0, 1
_MOST_ROWS = 64


def save_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace; see `Timeline.save_trace`."""
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "name": timeline.name,
            "world_size": timeline.world_size,
            "origin": timeline.origin,
            "step_us": timeline.step_s * 1e6,
        },
        "traceEvents": _events(timeline),
    }
    pathlib.Path(path).write_text(json.dumps(document))


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    messages = timeline.messages
    # Slices of one thread must nest or lie apart, or viewers drop some: messages that overlap get threads of their own.
    rows_of = rows(messages, _MOST_ROWS)
    events = [_metadata("process_name", 0, f"{timeline.name}, {timeline.world_size} ranks, {timeline.origin}")]
    events.append(_metadata("thread_name", _COMPUTE, "compute"))
    for row in range(max(rows_of, default=-1) + 1):
        events.append(_metadata("thread_name", _FIRST_MESSAGE_ROW + row, "messages" if not row else f"messages {row}"))
    for interval in timeline.compute:
        args: dict[str, Any] = {} if interval.bucket is None else {"bucket": interval.bucket}
        events.append(_slice(interval.name, interval.kind, _COMPUTE, interval.start_s, interval.end_s, args))
    for message, row in zip(messages, rows_of, strict=True):
        args = {"bucket": message.bucket, "size_bytes": message.size_bytes}
        thread = _FIRST_MESSAGE_ROW + row
        events.append(_slice(message.name, message.kind, thread, message.start_s, message.end_s, args))
    idle = waits(timeline)
    for bar in idle:
        args = {"bucket": bar.bucket}
        events.append(_slice(f"wait for bucket {bar.bucket}", "wait", _COMPUTE, bar.start_s, bar.end_s, args))
    # Where the compute lane takes up a bucket: in its wait, or in what reads it if it was there in time.
    taken = used(timeline)
    taken |= {bar.bucket: bar.start_s for bar in reversed(idle)}
    for message, row in zip(messages, rows_of, strict=True):
        if message.bucket is None or message.bucket not in taken:
            continue
        arrow = {"name": f"bucket {message.bucket}", "cat": "bucket", "id": message.bucket, "pid": 0}
        events.append({**arrow, "ph": "s", "tid": _FIRST_MESSAGE_ROW + row, "ts": message.start_s * 1e6})
        # An arrow may not point back in time, and a rank may wait before the message is on the wire. It ends in the
        # slice that encloses its time ("bp": "e").
        at_s = max(taken[message.bucket], message.start_s)
        events.append({**arrow, "ph": "f", "bp": "e", "tid": _COMPUTE, "ts": at_s * 1e6})
    return events


def _metadata(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": thread, "args": {"name": name}}


def _slice(name: str, kind: str, thread: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": thread, **times, "args": args}
