"""Predicts the memory that a step will hold: as a value, a table and a picture."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from fdp.distributed.by_collective import arriving_shape
from fdp.distributed.messages import MOST_RANKS_IN_ROWS
from fdp.emit.memory.allocation import effective_instructions, placed_storages, used_by
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.instructions import Await, Compute, Instruction, Send
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.plan import Plan
from fdp.tables import Printed, Table, count, format_bytes, short_name
from fdp.trace.operators.effects import tensors_in, tensors_with_storage
from fdp.trace.trace import Input

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AT_ONCE = 2
"""The number of messages that gloo works on at once: its default number of threads."""


@dataclass(frozen=True)
class InUse:
    """The memory in use, besides state and batch, during one instruction of a program.

    Attributes:
        values_bytes: of the block of the step, by what operators compute.
        buckets_bytes: of the block, by buckets that are summed up over ranks.
        gathered_bytes: of the block, by what arrives of all ranks.
        other_bytes: elsewhere.
        backward: whether a backward pass is under way.
    """

    values_bytes: int
    buckets_bytes: int
    gathered_bytes: int
    other_bytes: int
    backward: bool


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a rank holds on one device.

    Attributes:
        device: it.
        state_bytes: of the arguments that are no batch, and of what the step closes over.
        batch_bytes: of the batch.
        block_bytes: of the block that the step keeps from call to call: its buckets, what is gathered, and most values.
        other_bytes: the most that lies elsewhere at once: results in new memory, what operators put where they like,
            and what gloo gathers into before it copies.
        over_time: what is in use during each instruction of the program, and when it returns.
    """

    device: str
    state_bytes: int
    batch_bytes: int
    block_bytes: int
    other_bytes: int
    over_time: tuple[InUse, ...] = field(default=(), repr=False)

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.batch_bytes + self.block_bytes + self.other_bytes


@dataclass(frozen=True, repr=False)
class MemoryForecast(Printed):
    """The memory that a rank holds while a step runs operator by operator.

    What a kernel works in for itself is not known to a plan, and of the backend of the process group only what gloo
    gathers into.
    A compiler places values in its own way.

    Attributes:
        name: of the step.
        world_size: the number of ranks.
        devices: a row for each device.
    """

    name: str
    world_size: int
    devices: tuple[DeviceMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once, on the device that holds most."""
        return max((each.peak_bytes for each in self.devices), default=0)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw what is in use against the time of the step, kind upon kind, in a panel for each device.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        from fdp.emit.memory.peak_picture import draw_forecast

        return draw_forecast(self, path)

    def __repr__(self) -> str:
        return f"<MemoryForecast of {short_name(self.name)}: {format_bytes(self.peak_bytes)}>"

    def __str__(self) -> str:
        ranks = "each of " * (self.world_size > 1) + count(self.world_size, "rank")
        table = Table(
            f"Memory of {self.name} on {ranks}: {format_bytes(self.peak_bytes)} at most",
            ("device", "state", "batch", "block of the step", "elsewhere", "peak"),
        )
        for each in self.devices:
            sizes = (each.state_bytes, each.batch_bytes, each.block_bytes, each.other_bytes, each.peak_bytes)
            table.add(each.device, *map(format_bytes, sizes))
        return str(table)


def forecast_memory(plan: Plan) -> MemoryForecast:
    """Predict the memory that a rank holds while a plan is executed.

    Args:
        plan: it.

    Returns:
        The prediction.
    """
    memory = plan_memory(plan, communicates=plan.trace.world_size > 1)
    state: defaultdict[torch.device, int] = defaultdict(int)
    batch: defaultdict[torch.device, int] = defaultdict(int)
    for item in plan.trace.inputs:
        (batch if item.role == "batch" else state)[item.device] += _bytes_of(item)
    for node in plan.trace.graph.graph.find_nodes(op="get_attr"):
        for tensor in tensors_in(node.meta.get("val")):
            state[tensor.device] += tensor.numel() * tensor.element_size()
    other = _elsewhere(memory)
    devices = sorted({*state, *batch, *memory.layouts, *other}, key=str)
    rows = [
        DeviceMemory(
            str(device),
            state[device],
            batch[device],
            memory.layouts[device].size_bytes if device in memory.layouts else 0,
            max(other[device], default=0) if device in other else 0,
            _over_time(memory, device, other.get(device)),
        )
        for device in devices
    ]
    return MemoryForecast(plan.trace.name, plan.trace.world_size, tuple(rows))


def _bytes_of(item: Input) -> int:
    return torch.Size(item.shape).numel() * item.dtype.itemsize


def _over_time(memory: MemoryPlan, device: torch.device, other: list[int] | None) -> tuple[InUse, ...]:
    """The memory in use on a device during each instruction that does something, and when the program returns."""
    moments = [*effective_instructions(memory), len(memory.instructions)]
    values, buckets, gathered = ([0] * len(moments) for _ in range(3))
    layout = memory.layouts.get(device)
    for piece in layout.pieces if layout is not None else ():
        kind = values
        if isinstance(piece.key, tuple) and piece.key[0] in ("bucket", "result"):
            kind = gathered if memory.plan.buckets[piece.key[1]].collective.gathers else buckets
        for at in range(piece.first, piece.last + 1):
            kind[at] += piece.size_bytes
    others = [0 if other is None else other[moment] for moment in moments]
    backward = [_is_backward(memory.instructions[moment][1]) for moment in moments[:-1]]
    rows = zip(values, buckets, gathered, others, [*backward, False], strict=True)
    return tuple(InUse(*row) for row in rows)


def _is_backward(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute) and bool(instruction.node.meta.get("backward"))


def _elsewhere(memory: MemoryPlan) -> dict[torch.device, list[int]]:
    """The values on each device that are neither inputs nor in the block of the step.

    For each instruction its bytes, and at last those when the program returns.
    """
    placed = placed_storages(memory)
    sizes: dict[int, tuple[torch.device, int]] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def touch(node: fx.Node, position: int) -> None:
        value = memory.value_of(node)
        for number, tensor in tensors_with_storage(value.meta.get("val")):
            if number not in placed:
                sizes[number] = (tensor.device, tensor.untyped_storage().nbytes())
                first.setdefault(number, position)
                last[number] = position

    beside: defaultdict[int, list[tuple[torch.device, int]]] = defaultdict(
        list
    )  # what lies there at one position alone
    under_way: dict[int, tuple[torch.device, int]] = {}
    for position, (_, instruction) in enumerate(memory.instructions):
        for node in used_by(memory, instruction):
            touch(node, position)
            if node.name in memory.bodies:
                inside = _elsewhere(memory.bodies[node.name])
                beside[position] += [(device, max(each)) for device, each in inside.items()]
        if isinstance(instruction, Send) and (gathered := _copied_by_backend(memory, instruction.bucket)):
            under_way[instruction.bucket] = gathered
        beside[position] += sorted(under_way.values(), key=lambda copied: copied[1])[-_AT_ONCE:]
        if isinstance(instruction, Await):
            under_way.pop(instruction.bucket, None)
    end = len(memory.instructions)
    for node in memory.placement.returned:
        touch(node, end)
    for at in memory.placement.cloned:  # copied then, since its memory belongs to something else
        copied = tensors_in(memory.placement.returned[at].meta.get("val"))
        beside[end] += [(tensor.device, tensor.numel() * tensor.element_size()) for tensor in copied]
    changes: defaultdict[int, list[tuple[torch.device, int]]] = defaultdict(list)
    for number, (device, size) in sizes.items():
        changes[first[number]].append((device, size))
        changes[last[number] + 1].append((device, -size))
    found: defaultdict[torch.device, list[int]] = defaultdict(lambda: [0] * (end + 1))
    now: defaultdict[torch.device, int] = defaultdict(int)
    for position in range(end + 1):
        for device, size in changes[position]:
            now[device] += size
        for device, size in now.items():
            found[device][position] = size
        for device, size in beside[position]:
            found[device][position] += size
    return dict(found)


def _copied_by_backend(memory: MemoryPlan, index: int) -> tuple[torch.device, int] | None:
    """The buffer that gloo gathers into, and copies from, if ranks are too many to exchange rows; others have none."""
    bucket = memory.plan.buckets[index]
    size = memory.plan.trace.ranks_along(bucket.along)
    if bucket.device.type != "cpu" or not bucket.collective.gathers or size <= MOST_RANKS_IN_ROWS:
        return None
    return bucket.device, math.prod(arriving_shape(bucket, size)) * bucket.dtype.itemsize
