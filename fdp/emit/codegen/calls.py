"""Write one call of the graph: into its fixed place, as one of several results, or into new memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fdp.emit.codegen.added_products import write_added
from fdp.emit.codegen.lines import Line
from fdp.emit.codegen.loop_bodies import write_loop
from fdp.emit.codegen.packing import write_division
from fdp.emit.codegen.shortcuts import scalars_added, transposed_weight
from fdp.emit.codegen.writer import Writer, bind_object, bind_operator, emit, literal, name_in_program, view_of_input
from fdp.emit.memory.instructions import arguments_of, is_part
from fdp.emit.memory.out_variants import OutVariant, out_variant_of
from fdp.emit.memory.own_memory import row_name
from fdp.emit.memory.planning import result_name
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import effects_of, is_marker, mesh_dimension_of, storage_indexed, storages_of

_aten = torch.ops.aten


def write_call(writer: Writer, node: fx.Node, entries: Sequence[int]) -> None:
    """Write the lines that compute a node, if there are any; of a call that is made in parts, these list entries."""
    uses: set[str] = set()
    memory = writer.memory
    if not memory.is_called(node):
        return
    if node in memory.added:
        write_added(writer, node, memory.added[node])
        return
    if any(
        node in nodes for nodes in (memory.places.out_variants, memory.placement.written, memory.placement.reshaped)
    ):
        _write_into_place(writer, node)
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
        place = writer.memory.plan.trace.place_along(writer.rank, mesh_dimension_of(node))
        own = torch.tensor(place, dtype=torch.int64, device=node.meta["val"].device)
        constant = bind_object(writer, own, "axis_index")
        emit(writer, f"{bind_operator(writer, _aten.clone.default)}({constant})", uses, node)
    else:
        lent = _own_memory(writer, node)
        _write_operator(writer, node, entries)
        writer.local.update(lent)


def _own_memory(writer: Writer, node: fx.Node) -> dict[fx.Node, str]:
    """Copy a storage-indexed argument out of its bucket, where the same positions belong to other values.

    Returns:
        What the values were called before.
    """
    before: dict[fx.Node, str] = {}
    for argument in storage_indexed(node):
        row, holder = row_name(argument), writer.memory.value_of(argument)
        if row not in writer.memory.places.named or holder in before:
            continue
        value: torch.Tensor = argument.meta["val"]
        clone, as_strided = (bind_operator(writer, each) for each in (_aten.clone.default, _aten.as_strided.default))
        copied, own = f"copied_{node.name}_{len(before)}", f"own_{node.name}_{len(before)}"
        shape, stride, offset = list(value.shape), list(value.stride()), value.storage_offset()
        writer.lines.append(Line(f"{copied} = {clone}({row})", {row}, (copied,)))
        writer.lines.append(Line(f"{own} = {as_strided}({copied}, {shape}, {stride}, {offset})", {copied}, (own,)))
        before[holder], writer.local[holder] = writer.local[holder], own
    return before


def _write_entry(writer: Writer, node: fx.Node) -> None:
    """One of several values that a call returns."""
    uses: set[str] = set()
    sequence: Any = node.args[0]
    index: Any = node.args[1]
    if sequence in writer.memory.places.out_variants:
        writer.local[node] = result_name(sequence, index)
    elif writer.local.get(sequence) is None:
        # An entry of a call that was made in parts, or unpacked: each has its own name.
        writer.local[node] = _entry_name(sequence, index)
    else:
        emit(writer, f"{literal(writer, sequence, uses)}[{index!r}]", uses, node)


def _write_operator(writer: Writer, node: fx.Node, entries: Sequence[int]) -> None:
    """Call an operator that takes new memory for its results, if it needs any."""
    uses: set[str] = set()
    target: Any = node.target
    split = is_part(node, entries)
    args, kwargs = arguments_of(node, entries)
    if not writer.plain and (shorter := scalars_added(target, args, kwargs)) is not None:
        target, args, kwargs = shorter
    parts = [literal(writer, value, uses) for value in args]
    parts += [f"{key}={literal(writer, value, uses)}" for key, value in kwargs.items()]
    call = f"{bind_operator(writer, target, args, kwargs)}({', '.join(parts)})"
    if split and node.users:
        targets = tuple(_entry_name(node, entry) for entry in entries)
        writer.lines.append(Line(f"({', '.join(targets)},) = {call}", uses, targets))
    elif _is_unpacked(writer, node):
        # Each entry is dropped when it is not needed any more, not with the last of them.
        targets = tuple(_entry_name(node, index) for index in range(len(node.meta["val"])))
        writer.lines.append(Line(f"({', '.join(targets)},) = {call}", uses, targets, pure=effects_of(node).pure))
    else:
        emit(writer, call, uses, node)


def _entry_name(node: fx.Node, index: object) -> str:
    return f"{node.name}_entry{index}"


def _is_unpacked(writer: Writer, node: fx.Node) -> bool:
    """Whether a call returns several values, all of whose readers take one of them."""
    return (
        isinstance(node.meta.get("val"), (list, tuple))
        and bool(node.users)
        and node not in writer.memory.placement.returned
        and all(user.target is operator.getitem for user in node.users)
    )


def _write_into_place(writer: Writer, node: fx.Node) -> None:
    """Compute a node into its fixed place."""
    variant, outs = _variant_of(node), _places_of(writer, node)
    uses = set(outs)
    marker = writer.memory.places.divided.get(node)
    divides_itself = marker is not None and variant.scaled is not None and not node.kwargs
    if variant.kind == "fill":
        name = bind_operator(writer, _aten.fill_.Scalar, (node, variant.value))
        writer.lines.append(Line(f"{name}({outs[0]}, {literal(writer, variant.value, uses)})", uses))
    elif variant.kind == "copy":
        name = bind_operator(writer, _aten.copy_.default, (node, node.args[0]))
        source = literal(writer, node.args[0], uses)
        writer.lines.append(Line(f"{name}({outs[0]}, {source})", uses))
    else:
        _write_out_call(writer, node, variant, outs, uses, marker if divides_itself else None)
    if marker is not None and not divides_itself:
        averaged: Any = marker.args[0]
        write_division(writer, marker, outs[storages_of(node).index(*storages_of(averaged))])


def _places_of(writer: Writer, node: fx.Node) -> list[str]:
    """The names of the places that a node is computed into."""
    placement = writer.memory.placement
    if node in placement.written:
        # The new value of a donated input, in place of the old one.
        return [name_in_program(writer, node)]
    if (target := placement.reshaped.get(node)) is not None:
        writer.lines.append(view_of_input(writer, target, node))
        writer.local[node] = node.name
        return [node.name]
    if isinstance(node.meta["val"], torch.Tensor):
        return [node.name]
    return [result_name(node, index) for index in range(len(node.meta["val"]))]


def _variant_of(node: fx.Node) -> OutVariant:
    variant = out_variant_of(node)
    assert variant is not None
    return variant


def _write_out_call(
    writer: Writer, node: fx.Node, variant: OutVariant, outs: list[str], uses: set[str], averaged: fx.Node | None = None
) -> None:
    """Call the out variant; for a member of a mean, by its marker, the one that also divides by the number of ranks."""
    args, kwargs, call = [*node.args, *variant.extra], dict(node.kwargs), variant.operator
    if (weight := transposed_weight(writer, node)) is not None:
        call, args = _aten.linear.out, [node.args[1], weight, node.args[0]]
    if averaged is not None:
        # The product is divided on its way into the bucket.
        call, args = variant.scaled, [node, *args]
        kwargs = {"beta": 0, "alpha": writer.memory.share_of(averaged)}
    parts = [literal(writer, value, uses) for value in args]
    parts += [f"{key}={literal(writer, value, uses)}" for key, value in kwargs.items()]
    parts += [f"{key}={name}" for key, name in zip(variant.names, outs, strict=True)]
    examples = [node.meta["val"]] if len(outs) == 1 else node.meta["val"]
    name = bind_operator(writer, call, args, {**kwargs, **dict(zip(variant.names, examples, strict=True))})
    writer.lines.append(Line(f"{name}({', '.join(parts)})", uses))
