"""Walk a plan's schedule with a clock: what happens when, on the compute lane and on the link.

References: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3; Shi, Chu and Li, MG-WFBP (INFOCOM 2019),
section III, for the model of messages that begin when their gradients exist and the link is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fdp.plan.cost.costs import Costs
from fdp.plan.cost.network import Network, rank_count
from fdp.plan.cost.ticks import TICKS_PER_S, Ticks, ticks_of
from fdp.plan.plan import Bucket, Item, Plan, Run, Wait
from fdp.timeline.timeline import Interval, Timeline
from fdp.trace.trace import Operation, Trace


@dataclass
class SimulatedLanes:
    """The two lanes while a schedule is walked, in nanoseconds.

    Attributes:
        ticks: what everything takes.
        now: until when the compute lane is busy.
        free: when the link takes the next message.
        busy: until when a message is under way.
        messages: from when to when each message is under way that was started, by bucket.
    """

    ticks: Ticks
    now: float = 0.0
    free: float = 0.0
    busy: float = 0.0
    messages: dict[int, tuple[float, float]] = field(default_factory=dict)

    def compute(self, work: float) -> None:
        """Let the compute lane work, slower while a message is under way."""
        # Messages that were started are under way without a gap, from now at the latest.
        speed = 1 - self.ticks.slowdown
        slow = min(max(self.busy - self.now, 0.0), work / speed)
        self.now += slow + (work - slow * speed)

    def start(self, bucket: Bucket) -> None:
        """Start a bucket's message, which begins when the link is free."""
        whole, occupied = self.ticks.message(
            bucket.op_along, sum(self.ticks.on_link[member] for member in bucket.members)
        )
        begin = max(self.now, self.free)
        self.free = begin + occupied
        self.messages[bucket.index] = begin, begin + whole
        self.busy = max(self.busy, begin + whole)

    def wait(self, bucket: int) -> None:
        """Let the compute lane wait until a message is done."""
        self.now = max(self.now, self.messages[bucket][1])


def walk(
    buckets: Sequence[Bucket], schedule: Sequence[Item], lanes: SimulatedLanes
) -> Iterator[tuple[Item, float, float]]:
    """Move both lanes along a schedule.

    Args:
        buckets: of a plan.
        schedule: of that plan.
        lanes: at zero.

    Yields:
        Each entry, from when to when the compute lane is busy with it or waits.
    """
    ticks = lanes.ticks
    for item in schedule:
        begin = lanes.now
        if isinstance(item, Run):
            lanes.compute(sum(ticks.operations[index] for index in item.operations))
        elif ticks.silent:
            pass
        elif isinstance(item, Wait):
            lanes.wait(item.bucket)
        else:
            bucket = buckets[item.bucket]
            lanes.compute(ticks.start + sum(ticks.pack[member] for member in bucket.members))
            lanes.start(bucket)
        yield item, begin, lanes.now


def outcome(buckets: Sequence[Bucket], schedule: Sequence[Item], ticks: Ticks) -> tuple[float, float]:
    """When a schedule ends, and how much of that time the compute lane waits, in nanoseconds."""
    lanes, exposed = SimulatedLanes(ticks), 0.0
    for item, begin, end in walk(buckets, schedule, lanes):
        if isinstance(item, Wait):
            exposed += end - begin
    return lanes.now, exposed


def phases(operations: Sequence[Operation]) -> list[str]:
    """The phase of each operation: "forward", "backward" or "optimizer".

    "backward" is what autograd called; "optimizer" is what needs the result of a reduction or comes behind the last
    backward pass (counters, copies of the learning rate), and which no backward pass needs (batch normalisation across
    ranks waits for messages, and is forward all the same).
    """
    last = max((index for index, operation in enumerate(operations) if operation.backward), default=len(operations))
    leads_back = [operation.backward for operation in operations]
    for index in range(len(operations) - 1, -1, -1):
        if leads_back[index]:
            for need in operations[index].needs:
                leads_back[need] = True
    reduced: list[bool] = []
    found = []
    for index, operation in enumerate(operations):
        waits = any(reduced[need] for need in operation.needs)
        reduced.append(waits or operation.reduction is not None)
        late = (waits or index > last) and not leads_back[index]
        found.append("backward" if operation.backward else "optimizer" if late else "forward")
    return found


def simulate(plan: Plan, costs: Costs, network: Network, world_size: int | None = None) -> Timeline:
    """Predict what happens when in a step, without running it.

    The compute lane runs the schedule. To start a bucket it packs it, and pays for the start; the message then waits
    for the link. To wait for a bucket it stands still until the message is done. A single rank packs no buckets and
    sends nothing.

    Args:
        plan: of the step.
        costs: of its operations, in seconds.
        network: between its ranks.
        world_size: number of ranks; None for as many as the step was traced for.

    Returns:
        The timeline, in steps of a nanosecond unless messages slow computing down.

    Raises:
        ArgumentError: the costs are those of another trace, or there is no such number of ranks.
    """
    trace = plan.trace
    size = trace.world_size if world_size is None else rank_count(world_size)
    trace.refuse_other_ranks(size)
    lanes = SimulatedLanes(ticks_of(trace, costs, network, size))
    kinds = phases(trace.operations)
    intervals: list[Interval] = []
    messages: list[Interval] = []
    waited: int | None = None
    lets = buckets_released(plan)
    used: dict[int, float] = {}
    for item, begin, end in walk(plan.buckets, plan.schedule, lanes):
        if isinstance(item, Wait):
            waited = item.bucket
            used.update(dict.fromkeys(lets.get(waited, ()), end))
        elif isinstance(item, Run):
            first = item.operations[0]
            if end > begin:
                name = operation_label(trace.operations[first], len(item.operations))
                behind = waited if kinds[first] == "optimizer" else None
                intervals.append(_interval("compute", kinds[first], name, begin, end, behind))
        elif not lanes.ticks.silent:
            bucket = plan.buckets[item.bucket]
            if end > begin:
                intervals.append(_interval("compute", "pack", f"pack bucket {bucket.index}", begin, end, bucket.index))
            name = message_name(trace, bucket)
            sent, done = lanes.messages[bucket.index]
            size_bytes = bucket.size_bytes
            messages.append(_interval("communication", "message", name, sent, done, bucket.index, size_bytes))
    used_messages = (
        m if m.bucket not in used else dataclasses.replace(m, used_s=used[m.bucket] / TICKS_PER_S) for m in messages
    )
    return Timeline(
        name=trace.name,
        world_size=size,
        origin="simulated",
        intervals=(*intervals, *used_messages),
        step_s=lanes.now / TICKS_PER_S,
        alone_s=sum(lanes.ticks.operations) / TICKS_PER_S,
    )


def buckets_released(plan: Plan) -> dict[int, tuple[int, ...]]:
    """For each bucket whose wait is the last one before an operation: all buckets that were waited for since the
    previous operation. The compute lane continues with these together. A bucket that is not read is in no entry."""
    found: dict[int, tuple[int, ...]] = {}
    asking: list[int] = []
    for item in plan.schedule:
        if isinstance(item, Wait):
            asking.append(item.bucket)
        elif asking and isinstance(item, Run) and not plan.trace.operations[item.operations[0]].view:
            found[asking[-1]] = tuple(asking)
            asking.clear()
    return found


def operation_label(operation: Operation, entries: int) -> str:
    """The label of an operation's interval."""
    name = operation.target.removeprefix("aten.").rsplit(".", 1)[0]
    many = f" of {entries}" if operation.entry is not None else ""
    return f"{name}{many}" + (f" ({operation.source})" if operation.source else "")


def message_name(trace: Trace, bucket: Bucket) -> str:
    """The name of a bucket's message."""
    names = [trace.reductions[member].name for member in bucket.members]
    return f"{bucket.op_along} of " + (names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}")


def _interval(
    lane: str, kind: str, name: str, begin: float, end: float, bucket: int | None, size_bytes: int | None = None
) -> Interval:
    return Interval(lane, kind, name, begin / TICKS_PER_S, end / TICKS_PER_S, bucket, size_bytes)
