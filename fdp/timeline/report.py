"""Print a timeline: the totals, a row for each bucket, and the critical path."""

from __future__ import annotations

from fdp.tables import Table, count, format_bytes, heading, ms
from fdp.timeline.rows import hidden_s, used, waits
from fdp.timeline.timeline import Timeline

_MOST_STRETCHES = 14


def print_timeline(timeline: Timeline) -> str:
    """Lay out the text of `print(timeline)`."""
    parts = [heading(_totals(timeline))]
    if timeline.messages:
        parts.append(str(_buckets(timeline)))
    return "\n\n".join([*parts, str(_path(timeline))])


def _totals(timeline: Timeline) -> str:
    whole_s, hidden = timeline.communication_s, timeline.hidden_s
    share = f" ({hidden / whole_s:.0%})" if whole_s else ""
    return (
        f"Timeline of {timeline.name}, {count(timeline.world_size, 'rank')}, {timeline.origin}: "
        f"{ms(timeline.step_s)} ms a step, efficiency {timeline.efficiency:.1%}\n"
        f"compute lane: {ms(timeline.compute_s)} ms of computing, {ms(timeline.pack_s)} ms of packing buckets, "
        f"{ms(sum(bar.seconds for bar in waits(timeline)))} ms of waiting\n"
        f"communication lane: {ms(whole_s)} ms in {count(len(timeline.messages), 'message')}, "
        f"{ms(hidden)} ms hidden{share}, {ms(timeline.exposed_s)} ms exposed"
    )


def _buckets(timeline: Timeline) -> Table:
    idle = waits(timeline)
    taken = used(timeline)
    columns = ("bucket", "bytes", "starts, ms", "done, ms", "used, ms", "waited for, ms", "hidden")
    table = Table("messages", columns)
    for message in timeline.messages:
        own = [bar for bar in idle if message.bucket is not None and bar.bucket == message.bucket]
        seconds = message.end_s - message.start_s
        table.add(
            "" if message.bucket is None else message.bucket,
            "" if message.size_bytes is None else format_bytes(message.size_bytes),
            ms(message.start_s),
            ms(message.end_s),
            ms(taken[message.bucket]) if message.bucket in taken else "the end",
            ms(sum(bar.seconds for bar in own)) if own else "",
            f"{hidden_s(message, idle) / seconds:.0%}" if seconds else "",
        )
    return table


def _path(timeline: Timeline) -> Table:
    """The critical path, one row for each stretch of one kind."""
    stretches: list[tuple[str, float, float]] = []
    for i in timeline.critical_path:
        last = stretches[-1] if stretches else ("", 0.0, 0.0)
        if i.kind == "message":
            what = f"message of bucket {i.bucket}"
        elif i.kind == "pack":  # a moment within the backward pass
            what = last[0] if last[0] in ("forward", "backward") else f"packing bucket {i.bucket}"
        else:
            what = i.kind
        if what == last[0]:
            stretches[-1] = (what, last[1], i.end_s)
        else:
            stretches.append((what, i.start_s, i.end_s))
    longest = sorted(stretches, key=lambda stretch: stretch[1] - stretch[2])[:_MOST_STRETCHES]
    table = Table("critical path", ("from, ms", "to, ms", "the step waits for"))
    for what, start_s, end_s in sorted(longest, key=lambda stretch: stretch[1:]):
        table.add(ms(start_s), ms(end_s), what)
    if len(longest) < len(stretches):
        table.add("", "", f"shorter stretches: {len(stretches) - len(longest)}")
    return table
