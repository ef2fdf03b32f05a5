"""Write the program that carries a plan out: straight-line Python with operators bound to local names.

Values that have a fixed place in the memory of the step are names of that place, and so are all views of them: they
are made once. The program drops each other value right after its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fdp.emit.accesses import Accesses
from fdp.emit.donation import place_outputs
from fdp.emit.fill import early_fillings, write_copy, write_division, write_start
from fdp.emit.forms import Form, form_of
from fdp.emit.layout import Layout
from fdp.emit.lines import BEFORE, Line, Part, assemble, belongs, drop_unused, lay_out_lines, parts_of
from fdp.emit.loops import memory_of_body, write_loop
from fdp.emit.places import Place, find_places, result_name
from fdp.emit.products import find_added, write_added
from fdp.emit.shortcuts import counted_up, transposed_weight
from fdp.emit.views import redundant_views
from fdp.emit.writer import (
    Writer,
    bind_object,
    bind_operator,
    bucket_name,
    emit,
    free_name,
    literal,
    name_of,
    names_of_values,
)
from fdp.other_ranks import OtherRanks
from fdp.plan import Plan, Run, Start, plan_trace
from fdp.trace.effects import effects_of, is_marker, list_arguments, storages_of
from fdp.trace.loops import is_loop

_aten = torch.ops.aten


@dataclass(frozen=True)
class OwnMessages:
    """Messages that a program sends by itself, without `start` and `wait`.

    Attributes:
        pretended: makes a context in which nothing is sent, given what this rank takes the others to hold.
        caused: whether an error that the program raised comes from one of its messages.
    """

    pretended: Callable[[OtherRanks], AbstractContextManager[Any]]
    caused: Callable[[Exception], bool]


@dataclass(frozen=True)
class Program:
    """A generated step.

    Attributes:
        source: its text.
        function: takes a list of input tensors (which it empties), and the functions `start(k)` and `wait(k)`;
            returns the list of outputs. It finds values at fixed places among its globals.
        places: the names that it expects there.
        layouts: for each device, where the pieces of memory lie that places are in.
        scaled: buckets that it fills with values divided by the number of ranks.
        recording: what records the program as one piece of work for a device, if it is to be; it begins when its
            attribute `armed` is set.
        own_messages: what it sends by itself, if it does.
        parts: of a program that is timed, what lies between one tick and the next.
        loops: the programs of the bodies of its loops, by node.
        names: what it calls the values of the graph, as far as it computes them as they are, by node.
    """

    source: str
    function: Callable[..., list[torch.Tensor]]
    places: Mapping[str, Place]
    layouts: Mapping[torch.device, Layout]
    scaled: frozenset[int]
    recording: Any = None
    own_messages: OwnMessages | None = None
    parts: tuple[Part, ...] = ()
    loops: Mapping[str, Program] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def write_program(
    plan: Plan, rank: int, communicates: bool, tick: Callable[[], None] | None = None, plain: bool = False
) -> Program:
    """Generate the program of a plan.

    Args:
        plan: the plan.
        rank: this process's rank, for `fdp.axis_index`.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        tick: called at the beginning of the program and at the end of each of its parts, to have them timed.
        plain: whether every operator is called as it was traced, with new memory for its results, which are copied from
            there: what runs in place of a program that turned out to be wrong.

    Returns:
        The program.
    """
    graph = plan.trace.graph.graph
    nodes = {node.name: node for node in graph.nodes}

    def marker(member: int) -> fx.Node:
        return nodes[plan.trace.operations[plan.trace.reductions[member].operation].node]

    same, accesses = {} if plain else redundant_views(graph), Accesses(plan)
    added = {} if plain else find_added(graph, same, accesses)
    placement = place_outputs(plan, same, accesses, plain)
    markers = {b.index: [marker(m) for m in b.members] for b in plan.buckets if communicates or b.op == "all_gather"}
    travelling = {node for members in markers.values() for node in members}
    alone = {marker(index) for index in range(len(plan.trace.reductions))} - travelling
    places = find_places(plan, same, placement, accesses, markers, alone, plain)
    reserved = {stem: free_name(stem, nodes) for stem in ("inputs", "start", "wait")}
    bodies = {
        loop.node: write_program(plan_trace(loop.body), rank, communicates=False, plain=plain)
        for loop in plan.trace.loops
    }
    writer = Writer(plan, rank, same, placement, accesses, places, markers, reserved, bodies, added, plain)
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        writer.local[node] = node.name
    for node in graph.nodes:
        if node.op == "get_attr":
            writer.local[node] = bind_object(writer, getattr(plan.trace.graph, node.target), "constant")
        elif node in places.constants:
            writer.local[node] = bind_object(writer, places.constants[node], node.name)
        elif node.name in places.named:
            writer.local[node] = node.name
    fillings, filled = {} if plain else early_fillings(writer), set[str]()
    _copy_back(writer, -1)
    belongs(writer.lines, BEFORE)
    for at, item in enumerate(plan.schedule):
        first = len(writer.lines)
        if isinstance(item, Run):
            operations = [plan.trace.operations[index] for index in item.operations]
            node = nodes[operations[0].node]
            if node in alone:
                _write_alone(writer, node)
            elif node not in writer.seen_early:
                _write_call(writer, node, [o.lane for o in operations if o.lane is not None])
            for filling in fillings.get(node, ()):
                for view in filling.views:
                    if view not in writer.local:
                        _write_call(writer, view, [])
                        writer.seen_early.add(view)
                write_copy(writer, filling)
                filled.add(filling.slot)
        elif item.bucket in markers:
            if isinstance(item, Start):
                write_start(writer, plan.buckets[item.bucket], filled)
            else:
                text = f"{writer.reserved['wait']}({item.bucket})"
                writer.lines.append(Line(text, {bucket_name(item.bucket)}, part=Part("wait", item.bucket)))
                writer.local.update((node, node.name) for node in markers[item.bucket])
        elif isinstance(item, Start):
            for member in plan.buckets[item.bucket].members:
                _write_alone(writer, marker(member))
        _copy_back(writer, at)
        belongs(writer.lines[first:], Part("run", at))
    outputs = _write_outputs(writer)
    belongs(writer.lines, Part("run", len(plan.schedule) - 1))
    if not plain:
        writer.lines = drop_unused(writer.lines, outputs)
    memory_of = places.memory | {bucket_name(index): ("bucket", index) for index in markers}
    fixed = {*places.named, *(bucket_name(index) for index in markers)}
    sizes = dict(places.sizes)
    for loop, body in bodies.items():
        for called, key, size in memory_of_body(loop, body):
            memory_of[called], sizes[key] = key, size
            fixed.add(called)
    layouts = lay_out_lines(writer.lines, memory_of, sizes, shared=not plain)
    inputs = [writer.local[node] for node in placeholders]
    ticks = None if tick is None else bind_object(writer, tick, "tick")
    source = assemble(writer.lines, inputs, outputs, writer.bound, fixed, layouts, writer.reserved, ticks)
    namespace = dict(writer.bound)
    exec(compile(source, f"<fdp step {plan.trace.name}>", "exec"), namespace)
    scaled, parts = frozenset(places.scaled), parts_of(writer.lines)
    names = names_of_values(writer, graph)
    return Program(source, namespace["step"], places.named, layouts, scaled, parts=parts, loops=bodies, names=names)


def _write_call(writer: Writer, node: fx.Node, lanes: list[int]) -> None:
    """Write what computes a node, if anything has to; of a call whose lanes run apart, these lanes."""
    uses: set[str] = set()
    if node in writer.same or node in writer.placement.replaced or node in writer.places.constants:
        return  # another value takes its place
    if node in writer.added.values():
        return  # it is computed where it is added
    if node in writer.added:
        write_added(writer, node, writer.added[node])
        return
    if node in writer.places.forms or node in writer.placement.written:
        _write_into_place(writer, node)
    elif node.name in writer.places.named and not _changes_memory(node):
        return  # a view of a fixed place is one itself
    elif node.target is operator.getitem:
        _write_entry(writer, node)
    elif is_marker(node, "vary"):
        # Contiguous, as the marker itself makes it.
        format_ = bind_object(writer, torch.contiguous_format, "contiguous_format")
        clone = bind_operator(writer, _aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format})
        emit(writer, f"{clone}({literal(writer, node.args[0], uses)}, memory_format={format_})", uses, node)
    elif is_loop(node):
        write_loop(writer, node)
    elif is_marker(node, "axis_index"):
        own = torch.tensor(writer.rank, dtype=torch.int64, device=node.meta["val"].device)
        constant = bind_object(writer, own, "axis_index")
        emit(writer, f"{bind_operator(writer, _aten.clone.default)}({constant})", uses, node)
    else:
        _write_operator(writer, node, lanes)


def _write_entry(writer: Writer, node: fx.Node) -> None:
    """One of several values that a call returns."""
    uses: set[str] = set()
    sequence: Any = node.args[0]
    index: Any = node.args[1]
    if sequence in writer.places.forms:
        writer.local[node] = result_name(sequence, index)
    elif writer.local.get(sequence) is None:
        # One entry of a call whose lanes ran apart, or which was unpacked: each has its own name.
        writer.local[node] = _entry_name(sequence, index)
    else:
        emit(writer, f"{literal(writer, sequence, uses)}[{index!r}]", uses, node)


def _write_operator(writer: Writer, node: fx.Node, lanes: list[int]) -> None:
    """Call an operator that takes new memory for its results, if it needs any."""
    uses: set[str] = set()
    target: Any = node.target
    split = bool(lanes) and len(lanes) < lane_count(node)
    args, kwargs = arguments_of(node, lanes) if split else (list(node.args), dict(node.kwargs))
    if not writer.plain and (shorter := counted_up(target, args, kwargs)) is not None:
        target, args, kwargs = shorter
    parts = [literal(writer, value, uses) for value in args]
    parts += [f"{key}={literal(writer, value, uses)}" for key, value in kwargs.items()]
    call = f"{bind_operator(writer, target, args, kwargs)}({', '.join(parts)})"
    if split and node.users:
        targets = tuple(_entry_name(node, lane) for lane in lanes)
        writer.lines.append(Line(f"({', '.join(targets)},) = {call}", uses, targets))
    elif _is_unpacked(writer, node):
        # Each entry is dropped when it is not needed any more, not with the last of them.
        targets = tuple(_entry_name(node, index) for index in range(len(node.meta["val"])))
        if (memory := writer.places.memory.get(node.name)) is not None:
            # Views that have no place themselves (of a conjugate): the place that they look at is in use with them.
            writer.places.memory.update(dict.fromkeys(targets, memory))
        writer.lines.append(Line(f"({', '.join(targets)},) = {call}", uses, targets, pure=effects_of(node).pure))
    else:
        emit(writer, call, uses, node)


def arguments_of(node: fx.Node, lanes: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, of their lists only some lanes."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument, value in list_arguments(node):
        if value:
            chosen = [value[lane] for lane in lanes]
            if argument.name in kwargs:
                kwargs[argument.name] = chosen
            else:
                args[_position(node, argument.name)] = chosen
    return args, kwargs


def _changes_memory(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _entry_name(node: fx.Node, index: Any) -> str:
    return f"{node.name}_entry{index}"


def _is_unpacked(writer: Writer, node: fx.Node) -> bool:
    """Whether a call returns several values that are only ever looked at one by one."""
    return (
        isinstance(node.meta.get("val"), (list, tuple))
        and bool(node.users)
        and node not in writer.placement.returned
        and all(user.target is operator.getitem for user in node.users)
    )


def _write_into_place(writer: Writer, node: fx.Node) -> None:
    """Compute a node into its fixed place."""
    if node in writer.placement.written:
        # The new value of a donated input, in place of the old one.
        target = name_of(writer, node)
        _write_out_call(writer, node, _form(node), [target], {target})
        return
    form = writer.places.forms[node]
    outs = [node.name] if isinstance(node.meta["val"], torch.Tensor) else [
        result_name(node, index) for index in range(len(node.meta["val"]))
    ]  # fmt: skip
    uses = set(outs)
    marker = writer.places.divided.get(node)
    divides_itself = marker is not None and form.scaled is not None and not node.kwargs
    if form.kind == "nothing":
        return
    if form.kind == "fill":
        name = bind_operator(writer, _aten.fill_.Scalar, (node, form.value))
        writer.lines.append(Line(f"{name}({outs[0]}, {literal(writer, form.value, uses)})", uses))
    elif form.kind == "copy":
        name = bind_operator(writer, _aten.copy_.default, (node, node.args[0]))
        source = literal(writer, node.args[0], uses)
        writer.lines.append(Line(f"{name}({outs[0]}, {source})", uses, may_replace=_replaceable(writer, node)))
    else:
        _write_out_call(writer, node, form, outs, uses, divides_itself)
    if marker is not None and not divides_itself:
        averaged: Any = marker.args[0]
        write_division(writer, marker, outs[storages_of(node).index(*storages_of(averaged))])


def _form(node: fx.Node) -> Form:
    form = form_of(node)
    assert form is not None
    return form


def _write_out_call(
    writer: Writer, node: fx.Node, form: Form, outs: list[str], uses: set[str], divides: bool = False
) -> None:
    """Call the operator with its out arguments, or the one that also divides by the number of ranks."""
    args, kwargs, call = [*node.args, *form.extra], dict(node.kwargs), form.operator
    if (weight := transposed_weight(writer, node)) is not None:
        call, args = _aten.linear.out, [node.args[1], weight, node.args[0]]
    if divides:
        # The product is divided on its way into the bucket.
        call, args = form.scaled, [node, *args]
        kwargs = {"beta": 0, "alpha": 1 / writer.plan.trace.world_size}
    parts = [literal(writer, value, uses) for value in args]
    parts += [f"{key}={literal(writer, value, uses)}" for key, value in kwargs.items()]
    parts += [f"{key}={name}" for key, name in zip(form.names, outs, strict=True)]
    examples = [node.meta["val"]] if len(outs) == 1 else node.meta["val"]
    name = bind_operator(writer, call, args, {**kwargs, **dict(zip(form.names, examples, strict=True))})
    line = Line(f"{name}({', '.join(parts)})", uses)
    if form.pointwise and outs == [node.name]:
        line.may_replace = _replaceable(writer, node)
    writer.lines.append(line)


def _replaceable(writer: Writer, node: fx.Node) -> tuple[str, ...]:
    """Arguments whose place the result of a pointwise operator may take: those that are laid out as it is.

    An argument that is there twice, once under another shape, is read in another order than it would be written.
    """
    own = writer.places.named[node.name]
    found: dict[Any, list[str]] = {}
    for argument in node.all_input_nodes:
        name = name_of(writer, argument)
        if (place := writer.places.named.get(name)) is not None:
            found.setdefault(place.memory, []).append(name)
    same = []
    for names in found.values():
        there = [writer.places.named[name] for name in names]
        if all((p.shape, p.stride, p.offset, p.dtype) == (own.shape, own.stride, own.offset, own.dtype) for p in there):
            same.append(names[0])
    return tuple(same)


def lane_count(node: fx.Node) -> int:
    """How many lanes a call has."""
    return max(len(value) for _, value in list_arguments(node))


def _position(node: fx.Node, name: str) -> int:
    schema: Any = node.target
    return [argument.name for argument in schema._schema.arguments].index(name)


def _write_alone(writer: Writer, node: fx.Node) -> None:
    """A reduction that sends nothing: of one rank, or of no elements."""
    uses: set[str] = set()
    value = node.meta["val"]
    if value.numel() == 0:
        shape, device = list(value.shape), bind_object(writer, value.device, "device")
        dtype = bind_object(writer, value.dtype, "dtype")
        empty = bind_operator(writer, _aten.empty.memory_format)
        emit(writer, f"{empty}({shape}, dtype={dtype}, device={device})", uses, node)
    elif node in writer.places.alone:
        source: Any = node.args[0]
        writer.local[node] = name_of(writer, source)
    else:
        name = literal(writer, node.args[0], uses)
        format_ = bind_object(writer, torch.contiguous_format, "contiguous_format")
        clone = bind_operator(writer, _aten.clone.default)
        emit(writer, f"{clone}({name}, memory_format={format_})", uses, node)


def _copy_back(writer: Writer, at: int) -> None:
    for target, node in writer.placement.copies.get(at, ()):
        uses: set[str] = set()
        copy = bind_operator(writer, _aten.copy_.default, (target, node))
        writer.lines.append(Line(f"{copy}({literal(writer, target, uses)}, {literal(writer, node, uses)})", uses))


def _write_outputs(writer: Writer) -> list[str]:
    outputs = []
    for position, node in enumerate(writer.placement.returned):
        name = name_of(writer, node)
        if position in writer.placement.cloned:
            clone = bind_operator(writer, _aten.clone.default, (node,))
            writer.lines.append(Line(f"output_{position} = {clone}({name})", {name}, (f"output_{position}",)))
            name = f"output_{position}"
        outputs.append(name)
    return outputs
