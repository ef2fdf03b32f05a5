"""Print a timeline: the totals, a row for each bucket, and what the end of the step waits for."""

from __future__ import annotations

from fdp.plan.lanes import Block, hidden_s, lane, shared_s, union, waits
from fdp.plan.timeline import Interval, Timeline
from fdp.stages import enters
from fdp.table import Table, count, format_bytes

_MOST_STRETCHES = 12


@enters("print_timeline")
def print_timeline(timeline: Timeline) -> str:
    """Lay out the text of `print(timeline)`."""
    parts = [_totals(timeline)]
    messages = lane(timeline, "communication")
    if messages:
        parts.append(str(_buckets(timeline, messages)))
    return "\n\n".join([*parts, str(_course(timeline))])


def _totals(timeline: Timeline) -> str:
    messages = lane(timeline, "communication")
    idle, busy = waits(timeline), union(messages)
    compute_s = sum(i.end_s - i.start_s for i in lane(timeline, "compute"))
    exposed_s = sum(block.seconds for block in idle)
    busy_s = sum(block.seconds for block in busy)
    hidden = busy_s - sum(shared_s(block, idle) for block in busy)
    efficiency = compute_s / timeline.step_s if timeline.step_s else 1.0
    share = f" ({hidden / busy_s:.0%})" if busy_s else ""
    return (
        f"Timeline of {timeline.name}, {count(timeline.world_size, 'rank')}, {timeline.origin}: "
        f"{_ms(timeline.step_s)} ms a step\n"
        f"compute {_ms(compute_s)} ms, exposed {_ms(exposed_s)} ms: efficiency {efficiency:.1%}\n"
        f"communication {_ms(busy_s)} ms in {count(len(messages), 'message')}, "
        f"hidden {_ms(hidden)} ms{share}"
    )


def _buckets(timeline: Timeline, messages: tuple[Interval, ...]) -> Table:
    idle = waits(timeline)
    taken = {i.bucket: i.start_s for i in reversed(lane(timeline, "compute")) if i.kind == "optimizer"}
    columns = ("bucket", "bytes", "starts, ms", "done, ms", "used, ms", "waited for, ms", "hidden")
    table = Table("messages", columns)
    for message in messages:
        own = [block for block in idle if message.bucket is not None and block.bucket == message.bucket]
        seconds = message.end_s - message.start_s
        table.add(
            "" if message.bucket is None else message.bucket,
            "" if message.size_bytes is None else format_bytes(message.size_bytes),
            _ms(message.start_s),
            _ms(message.end_s),
            _ms(taken[message.bucket]) if message.bucket in taken else "the end",
            _ms(sum(block.seconds for block in own)) if own else "",
            f"{hidden_s(message, idle) / seconds:.0%}" if seconds else "",
        )
    return table


def _course(timeline: Timeline) -> Table:
    """What the compute lane does, stretch by stretch: its waits are what could be won."""
    working = [Block(i.kind, None, i.start_s, i.end_s) for i in lane(timeline, "compute") if i.kind != "pack"]
    stretches: list[Block] = []
    for block in sorted([*working, *waits(timeline)], key=lambda block: block.start_s):
        last = stretches[-1] if stretches else None
        if last and block.kind != "wait" and last.kind == block.kind:
            stretches[-1] = Block(block.kind, None, last.start_s, block.end_s)
        else:
            stretches.append(block)
    longest = sorted(stretches, key=lambda block: -block.seconds)[:_MOST_STRETCHES]
    table = Table("the compute lane", ("from, ms", "to, ms", "the rank"))
    for block in sorted(longest, key=lambda block: block.start_s):
        of = "" if block.bucket is None else f" for bucket {block.bucket}"
        doing = f"waits{of}" if block.kind == "wait" else f"computes, {block.kind}"
        table.add(_ms(block.start_s), _ms(block.end_s), doing)
    if len(longest) < len(stretches):
        table.add("", "", f"shorter ones: {len(stretches) - len(longest)}")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
