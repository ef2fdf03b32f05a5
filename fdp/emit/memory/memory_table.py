"""What a memory plan decides about each piece of memory, and why: as rows, a table and a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fdp.emit.memory.allocation import blocks_text, effective_instructions, names_of_pieces, placed_storages, used_by
from fdp.emit.memory.layout import Layout, Lifetime
from fdp.emit.memory.map_picture import draw_map
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.tables import Table, count
from fdp.trace.operators.effects import storages_of, tensors_with_storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 24
_FIRST = "first in its place"


@dataclass(frozen=True)
class Row:
    """A piece of memory, with the reason for its place.

    Attributes:
        name: of the first value in it; of the donated input that it is; or "bucket 0", or "memory of" a loop.
        why: what was decided.
        device: where it is.
        size_bytes: its size.
        offset_bytes: where it begins in the block of its device; -1 if it lies elsewhere.
        first: the instruction of the program that uses it first, counted from 0.
        last: the instruction that uses it last; how many there are, if it lives on behind them.
        bucket: the index of the bucket that it is; None if it is none.
    """

    name: str
    why: str
    device: str
    size_bytes: int
    offset_bytes: int
    first: int
    last: int
    bucket: int | None = None


def rows_of(memory: MemoryPlan) -> tuple[Row, ...]:
    """Explain the place of each piece of memory of a step, in the order of first use.

    Inputs that are not donated, and what the step closes over, belong to others and are left out.
    """
    found = [row for device, layout in memory.layouts.items() for row in _in_block(memory, device, layout)]
    found += _elsewhere(memory)
    return tuple(sorted(found, key=lambda row: (row.device, row.first)))


def _in_block(memory: MemoryPlan, device: torch.device, layout: Layout) -> Iterator[Row]:
    """The pieces in the block of a device, which the step keeps from call to call."""
    names = names_of_pieces(memory.places.named)
    pieces = sorted(layout.pieces, key=lambda piece: piece.first)
    for at, piece in enumerate(pieces):
        bucket = None
        if not isinstance(piece.key, tuple):
            name, why = names.get(piece.key, ""), _why_there(layout, pieces[:at], piece, names)
        elif piece.key[0] == "bucket":
            bucket = piece.key[1]
            name, why = f"bucket {bucket}", _filled(memory, bucket)
        elif piece.key[0] == "result":
            bucket = piece.key[1]
            name, why = f"result of bucket {bucket}", "what arrives"
        else:
            name, why = f"memory of {piece.key[1]}", "what the body of the loop computes"
        yield Row(
            name, why, str(device), piece.size_bytes, layout.offsets[piece.key], piece.first, piece.last, bucket
        )  # fmt: skip


def _filled(memory: MemoryPlan, bucket: int) -> str:
    """How the members of a bucket get there."""
    members = memory.markers[bucket]
    direct = sum(marker in memory.places.direct for marker in members)
    ways = [(direct, "computed in it"), (len(members) - direct, "packed into it")]
    divided = ", divided for the mean" if bucket in memory.places.scaled else ""
    return "bucket: " + ", ".join(f"{number} {way}" for number, way in ways if number) + divided


def _why_there(layout: Layout, before: list[Lifetime], piece: Lifetime, names: dict[Any, str]) -> str:
    """Whether a value reuses the place of an argument, the memory of dead values, or has new memory."""
    begin = layout.offsets[piece.key]
    end = begin + piece.size_bytes
    over = [each for each in before if layout.offsets[each.key] < end and begin < _end(layout, each)]
    for each in over:
        if each.key in piece.may_reuse and each.last == piece.first and layout.offsets[each.key] == begin:
            return f"reused: in place of its argument {names.get(each.key, '')}"
    return "reused: others there are done" if over else _FIRST


def _end(layout: Layout, piece: Lifetime) -> int:
    return layout.offsets[piece.key] + piece.size_bytes


def _elsewhere(memory: MemoryPlan) -> Iterator[Row]:
    """Donated inputs, constants, and what has new memory at each call."""
    done = [memory.instructions[at][1] for at in effective_instructions(memory)]
    end, placement = len(done), memory.placement
    uses = [(position, node) for position, instruction in enumerate(done) for node in used_by(memory, instruction)]
    uses += [(end, node) for node in placement.returned]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, used in uses:
        for storage in storages_of(memory.value_of(used)):
            first.setdefault(storage, position)
            last[storage] = position
    placed, kept = placed_storages(memory), {s for node in placement.returned for s in storages_of(node)}
    fates = dict(_donated(memory))
    for storage, (node, name, tensor) in _makers(memory.plan.trace.graph.graph).items():
        if storage not in first:
            continue
        size, position = tensor.untyped_storage().nbytes(), first[storage]
        if node in fates:
            yield Row(*fates[node], str(tensor.device), size, -1, 0, end)
        elif node in memory.places.constants:
            yield Row(name, "persistent: the same at every call", str(tensor.device), size, -1, 0, end)
        elif storage not in placed:
            why = "new: returned" if storage in kept else "new at each call"
            yield Row(name, why, str(tensor.device), size, -1, position, last[storage])
    outputs = [output for output in memory.plan.trace.outputs if output.node is not None]
    for at in sorted(placement.cloned):
        value = placement.returned[at].meta["val"]
        why = f"new: a copy of {placement.returned[at].name}, returned"
        yield Row(outputs[at].name, why, str(value.device), value.numel() * value.itemsize, -1, end, end)


def _makers(graph: fx.Graph) -> dict[int, tuple[fx.Node, str, torch.Tensor]]:
    """For each piece of memory of a graph, the node that makes it, with name and example value of the result."""
    found: dict[int, tuple[fx.Node, str, torch.Tensor]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        several = isinstance(value, (list, tuple))
        for at, (storage, tensor) in enumerate(tensors_with_storage(value)):
            found.setdefault(storage, (node, f"{node.name}[{at}]" if several else node.name, tensor))
    return found


def _donated(memory: MemoryPlan) -> Iterator[tuple[fx.Node, tuple[str, str]]]:
    """For each donated input that gets a new value, its name, and how the value gets there."""
    trace, placement = memory.plan.trace, memory.placement
    how = {target: "updated in place" for target in placement.replaced.values()}
    for computed in (placement.written, placement.reshaped):
        how.update((target, f"{node.name} is computed in it") for node, target in computed.items())
    how.update((target, f"{node.name} arrives in it") for node, target in placement.gathered.items())
    for pairs in placement.copies.values():
        how.update((target, f"{node.name} is copied into it") for target, node in pairs)
    for node, item in zip(trace.graph.graph.find_nodes(op="placeholder"), trace.inputs, strict=True):
        if node in how:
            yield node, (item.name, f"donated: {how[node]}")


def memory_text(memory: MemoryPlan) -> str:
    """A table of the largest pieces."""
    blocks = blocks_text((str(device), each.size_bytes, each.needed_bytes) for device, each in memory.layouts.items())
    title = f"Memory plan of {memory.plan.trace.name}: {blocks}"
    table = Table(title, ("value", "bytes", "from", "to", "why"))
    rows = rows_of(memory)
    largest = set(sorted(range(len(rows)), key=lambda at: -rows[at].size_bytes)[:_MOST_ROWS])
    for at, row in enumerate(rows):
        if at in largest:
            table.add(row.name, row.size_bytes, row.first, row.last, row.why)
    lines = [str(table)]
    if len(rows) > len(largest):
        lines.append(f"... and {count(len(rows) - len(largest), 'smaller piece')}")
    for nodes, noun, why in (
        (memory.same, "view", "not made: its base is the same"),
        (memory.added, "product", "without memory: computed where it is added"),
        (memory.unused, "value", "not computed: nothing reads it"),
    ):
        if nodes:
            lines.append(f"{count(len(nodes), noun)} {why}")
    return "\n".join(lines)


def draw_plan(memory: MemoryPlan, path: str | os.PathLike[str] | None) -> Figure:
    """Draw the pieces in the blocks, address against time; see `MemoryPlan.draw`."""
    rows = [row for row in rows_of(memory) if row.offset_bytes >= 0]
    sizes = [(str(device), layout.size_bytes) for device, layout in memory.layouts.items()]
    needed = [(str(device), layout.needed_bytes) for device, layout in memory.layouts.items()]
    light = {row for row in rows if row.why == _FIRST}
    return draw_map(memory.plan.trace.name, "memory plan", sizes, needed, rows, path, light)
