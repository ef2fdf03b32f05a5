"""Write the program that carries a plan out: straight-line Python with operators bound to local names.

Values that have a fixed place in the memory of the step are names of that place, and so are all views of them: they
are made once. The program drops each other value right after its last use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from fdp.emit.codegen.calls import write_call
from fdp.emit.codegen.lines import Line, ProgramPart, assemble, assign_part, drop_unused, parts_of
from fdp.emit.codegen.packing import write_division_in_bucket, write_packing
from fdp.emit.codegen.writer import (
    Writer,
    bind_object,
    bind_operator,
    emit,
    free_name,
    literal,
    name_in_program,
    names_of_values,
    view_of_input,
)
from fdp.emit.memory.elements import has_each_element_once, has_gaps, span_of
from fdp.emit.memory.instructions import Await, Compute, Divide, Instruction, Keep, Pack, Send, Update
from fdp.emit.memory.layout import Layout
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.planning import Place
from fdp.tables import count, format_bytes

_aten = torch.ops.aten


class Recorder(Protocol):
    """What records a program as one piece of work for a device.

    Attributes:
        armed: whether it may begin.
    """

    armed: bool


@dataclass(frozen=True, repr=False)
class Program:
    """A generated step.

    Attributes:
        source: its text.
        function: takes a list of input tensors (which it empties), and the functions `start(k)`, or `start(k, into)`
            for what is gathered right into memory of an input, and `wait(k)`; returns the list of outputs. It finds
            values at fixed places among its globals.
        places: the names that it expects there.
        layouts: for each device, where the pieces of memory lie that places are in.
        scaled: buckets that it packs with values divided by the number of ranks.
        gathered: buckets of which it says at each call where what arrives goes.
        recording: what records the program as one piece of work for a device; None if it is not to be.
        parts: of a program that is timed, what lies between one tick and the next.
        loops: the programs of the bodies of its loops, by node.
        names: what it calls the values of the graph, as far as it computes them as they are, by node.
    """

    source: str
    function: Callable[..., list[torch.Tensor]]
    places: Mapping[str, Place]
    layouts: Mapping[torch.device, Layout]
    scaled: frozenset[int]
    recording: Recorder | None = None
    parts: tuple[ProgramPart, ...] = ()
    loops: Mapping[str, Program] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    gathered: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        size_bytes = sum(layout.size_bytes for layout in self.layouts.values())
        lines = count(len(self.source.splitlines()), "line")
        return f"<Program of {lines}: {count(len(self.places), 'place')} in {format_bytes(size_bytes)} of memory>"


def write_program(memory: MemoryPlan, rank: int, tick: Callable[[], None] | None = None) -> Program:
    """Generate the program of a plan.

    Args:
        memory: what was decided of the plan. If nothing is saved (`NONE`), every operator is called as it was traced,
            with new memory for its results.
        rank: this process's rank, for `fdp.axis_index`.
        tick: called at the beginning of the program and at the end of each of its parts, to have them timed.

    Returns:
        The program.
    """
    plan = memory.plan
    reserved = {stem: free_name(stem, plan.trace.nodes) for stem in ("inputs", "start", "wait")}
    bodies = {loop: write_program(body, rank) for loop, body in memory.bodies.items()}
    writer = Writer(memory, rank, reserved, bodies, tick)
    for each in PASSES:
        each(writer)
    namespace = dict(writer.bound)
    exec(compile(writer.source, f"<fdp step {plan.trace.name}>", "exec"), namespace)
    return Program(
        writer.source,
        namespace["step"],
        memory.places.named,
        memory.layouts,
        memory.places.scaled,
        parts=parts_of(writer.lines),
        loops=bodies,
        names=names_of_values(writer, plan.trace.graph.graph),
        gathered=frozenset(bucket for bucket in memory.markers if _filled(memory, bucket) is not None),
    )


def _name_what_is_there(writer: Writer) -> None:
    """Give names to inputs, closed-over tensors, constants, and values at fixed places."""
    places, trace = writer.memory.places, writer.memory.plan.trace
    for node in trace.graph.graph.nodes:
        if node.op == "placeholder" or node.name in places.named:
            writer.local[node] = node.name
        elif node.op == "get_attr":
            writer.local[node] = bind_object(writer, getattr(trace.graph, node.target), "constant")
        elif node in places.constants:
            writer.local[node] = bind_object(writer, places.constants[node], node.name)


def _write_instructions(writer: Writer) -> None:
    """Write what the memory plan lists, in its order."""
    for at, group in itertools.groupby(writer.memory.instructions, key=lambda each: each[0]):
        first = len(writer.lines)
        for _, instruction in group:
            _write(writer, instruction)
        assign_part(writer.lines[first:], ProgramPart("run", at))


def _write(writer: Writer, instruction: Instruction) -> None:
    """Write one instruction."""
    match instruction:
        case Compute(node, entries):
            write_call(writer, node, entries)
        case Keep(marker):
            _write_alone(writer, marker)
        case Pack():
            write_packing(writer, instruction)
        case Divide():
            write_division_in_bucket(writer, instruction)
        case Send(bucket):
            _write_start(writer, bucket)
        case Await(bucket):
            text = f"{writer.reserved['wait']}({bucket})"
            writer.lines.append(Line(text, set(), part=ProgramPart("wait", bucket)))
            writer.local.update((marker, marker.name) for marker in writer.memory.markers[bucket])
        case Update(target, value):
            uses: set[str] = set()
            copy = bind_operator(writer, _aten.copy_.default, (target, value))
            writer.lines.append(Line(f"{copy}({literal(writer, target, uses)}, {literal(writer, value, uses)})", uses))


def _filled(memory: MemoryPlan, bucket: int) -> fx.Node | None:
    """The donated input that the message of a bucket writes to, if there is one."""
    return memory.placement.gathered.get(memory.markers[bucket][0])


def _write_start(writer: Writer, bucket: int) -> None:
    """Start the message of a bucket, in the memory of a donated input if it is to arrive there."""
    start, part = writer.reserved["start"], ProgramPart("start", bucket)
    target = _filled(writer.memory, bucket)
    if target is None:
        writer.lines.append(Line(f"{start}({bucket})", set(), part=part))
        return
    (marker,) = writer.memory.markers[bucket]
    writer.lines.append(view_of_input(writer, target, marker, part))
    writer.lines.append(Line(f"{start}({bucket}, {marker.name})", {marker.name}, part=part))


def _write_alone(writer: Writer, node: fx.Node) -> None:
    """Write a reduction that sends nothing: over one rank, or of no elements."""
    uses: set[str] = set()
    value = node.meta["val"]
    if value.numel() == 0:
        shape, device = list(value.shape), bind_object(writer, value.device, "device")
        dtype = bind_object(writer, value.dtype, "dtype")
        empty = bind_operator(writer, _aten.empty.memory_format)
        emit(writer, f"{empty}({shape}, dtype={dtype}, device={device})", uses, node)
    elif node in writer.memory.places.alone:
        source: Any = node.args[0]
        writer.local[node] = name_in_program(writer, source)
    else:
        name = literal(writer, node.args[0], uses)
        format_ = bind_object(writer, torch.contiguous_format, "contiguous_format")
        clone = bind_operator(writer, _aten.clone.default)
        emit(writer, f"{clone}({name}, memory_format={format_})", uses, node)


def _empty_like(writer: Writer, node: fx.Node) -> str:
    """The call that makes an empty tensor of a value's shape and strides."""
    value = node.meta["val"]
    device, dtype = bind_object(writer, value.device, "device"), bind_object(writer, value.dtype, "dtype")
    empty = bind_operator(writer, _aten.empty_strided.default)
    return f"{empty}({list(value.shape)}, {list(value.stride())}, dtype={dtype}, device={device})"


def _write_copy(writer: Writer, node: fx.Node, name: str, own: str) -> None:
    """Copy a result into memory of its own; it lies there as it did, which `clone` alone would not see to."""
    value = node.meta["val"]
    clone = bind_operator(writer, _aten.clone.default, (node,))
    if not has_each_element_once(value):
        as_strided = bind_operator(writer, _aten.as_strided.default)
        span, copied = f"span_{own}", f"copied_{own}"
        writer.lines.append(Line(f"{span} = {as_strided}({name}, [{span_of(value)}], [1])", {name}, (span,)))
        writer.lines.append(Line(f"{copied} = {clone}({span})", {span}, (copied,)))
        shape, stride = list(value.shape), list(value.stride())
        writer.lines.append(Line(f"{own} = {as_strided}({copied}, {shape}, {stride}, 0)", {copied}, (own,)))
    elif has_gaps(value):
        writer.lines.append(Line(f"{own} = {_empty_like(writer, node)}", set(), (own,)))
        copy = bind_operator(writer, _aten.copy_.default, (node, node))
        writer.lines.append(Line(f"{copy}({own}, {name})", {name, own}))
    else:
        writer.lines.append(Line(f"{own} = {clone}({name})", {name}, (own,)))


def _write_outputs(writer: Writer) -> None:
    """Write the names of the results, and copies of those whose memory belongs to something else."""
    for position, node in enumerate(writer.memory.placement.returned):
        name = name_in_program(writer, node)
        if position in writer.memory.placement.cloned:
            own = f"output_{position}"
            _write_copy(writer, node, name, own)
            name = own
        writer.outputs.append(name)
    assign_part(writer.lines, ProgramPart("run", len(writer.memory.plan.schedule) - 1))


def _leave_out_unused(writer: Writer) -> None:
    """Drop lines that nothing needs."""
    if not writer.plain:
        writer.lines = drop_unused(writer.lines, writer.outputs)


def _put_together(writer: Writer) -> None:
    """Join the lines into the text of a program."""
    memory = writer.memory
    inputs = [writer.local[node] for node in memory.plan.trace.graph.graph.find_nodes(op="placeholder")]
    tick = None if writer.tick is None else bind_object(writer, writer.tick, "tick")
    writer.source = assemble(
        writer.lines, inputs, writer.outputs, writer.bound, memory.places.named, memory.layouts, writer.reserved, tick
    )


PASSES: tuple[Callable[[Writer], None], ...] = (
    _name_what_is_there,
    _write_instructions,
    _write_outputs,
    _leave_out_unused,
    _put_together,
)
"""From a memory plan to the text of a program, one after the other."""
