"""Offsets of pieces of memory; each is live from the first instruction that touches it to the last one."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from torch import fx

from fdp.emit.memory.instructions import Await, Compute, Divide, Instruction, Keep, Pack, Send, Update, arguments_of
from fdp.emit.memory.layout import Layout, Lifetime, lay_out
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.planning import Place, result_name
from fdp.tables import format_bytes
from fdp.trace.operators.effects import effects_of, nodes_in, storages, storages_of


def allocate(memory: MemoryPlan) -> dict[torch.device, Layout]:
    """Place every piece of memory that a program touches.

    Args:
        memory: everything else that is decided about memory.

    Returns:
        A layout for each device.
    """
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    may_reuse: dict[Hashable, tuple[Hashable, ...]] = {}
    done = [memory.instructions[at][1] for at in effective_instructions(memory)]
    for position, instruction in enumerate(done):
        for piece in _touched(memory, instruction):
            if piece not in first:
                first[piece] = position
                may_reuse[piece] = _replaceable(memory, instruction, piece)
            last[piece] = position
    end = len(done)
    # A result that lies in a piece is copied from there at the end.
    last.update((piece, end) for piece in map(memory.piece_of, memory.placement.returned) if piece in first)
    sizes = dict(memory.places.sizes)
    for node, body in memory.bodies.items():
        sizes.update(memory_of_body(node, body.layouts))
    pieces: dict[torch.device, list[Lifetime]] = {}
    for piece, begin in first.items():
        device, size_bytes = sizes[piece]
        lifetime = Lifetime(piece, size_bytes, begin, last[piece], may_reuse[piece])
        pieces.setdefault(device, []).append(lifetime if memory.savings.reuse else Lifetime(piece, size_bytes, 0, end))
    return {device: lay_out(found) for device, found in pieces.items()}


def memory_of_body(
    node: str, layouts: Mapping[torch.device, Layout]
) -> Iterator[tuple[tuple[str, str, torch.device], tuple[torch.device, int]]]:
    """The memory that the body of a loop needs on each device: key of the piece, device and size.

    It is in use while the loop runs.
    """
    for device, layout in layouts.items():
        if layout.size_bytes:
            yield ("loop", node, device), (device, layout.size_bytes)


def effective_instructions(memory: MemoryPlan) -> list[int]:
    """The indices of the instructions that do something; lifetimes in a layout are counted in these."""
    return [
        at
        for at, (_, each) in enumerate(memory.instructions)
        if not isinstance(each, Compute) or _computes(memory, each)
    ]


def _computes(memory: MemoryPlan, compute: Compute) -> bool:
    """Whether a call computes anything; views, and taking one of several results, do not."""
    node = compute.node
    return memory.is_called(node) and node.target is not operator.getitem and not effects_of(node).view


def _touched(memory: MemoryPlan, instruction: Instruction) -> Iterator[Hashable]:
    """The pieces of memory that an instruction reads or writes, in a fixed order."""
    match instruction:
        case Compute(node, _):
            yield from (memory.places.memory[name] for name in _results(memory, node))
            if node.name in memory.bodies:
                yield from (key for key, _ in memory_of_body(node.name, memory.bodies[node.name].layouts))
        case Pack(bucket, _) | Divide(bucket):
            yield "bucket", bucket
        case Send(bucket) | Await(bucket):
            yield "bucket", bucket
            if ("result", bucket) in memory.places.sizes:
                yield "result", bucket  # a backend may write there at any time between the two
    yield from (piece for piece in map(memory.piece_of, read_by(memory, instruction)) if piece is not None)


def read_by(memory: MemoryPlan, instruction: Instruction) -> Iterator[fx.Node]:
    """The values that an instruction reads, and the donated input that it updates."""
    match instruction:
        case Compute(node, entries):
            variant = memory.places.out_variants.get(node)
            if variant is None or variant.kind != "fill":
                args, kwargs = arguments_of(node, entries)
                product = memory.added[node].args if node in memory.added else ()
                yield from nodes_in([args, list(kwargs.values()), product])
        case Keep(marker):
            yield from () if marker in memory.places.alone else nodes_in(marker.args[:1])
        case Pack(bucket, members):
            yield from nodes_in([memory.markers[bucket][member].args[0] for member in members])
        case Update(target, value):
            yield from (target, value)


def used_by(memory: MemoryPlan, instruction: Instruction) -> Iterator[fx.Node]:
    """The values that an instruction makes, reads or changes; none for a call that is not made."""
    made = instruction.node if isinstance(instruction, Compute) else None
    if made is not None and not memory.is_called(made):
        return
    yield from read_by(memory, instruction)
    if made is not None:
        yield made
    elif isinstance(instruction, Keep):
        yield instruction.marker


def placed_storages(memory: MemoryPlan) -> set[int]:
    """The memory that has a place before a call: of inputs and constants, and in the block of the step."""
    found: set[int] = set()
    for node in memory.plan.trace.graph.graph.nodes:
        value = node.meta.get("val")
        if (
            node.op in ("placeholder", "get_attr")
            or node in memory.places.constants
            or node.name in memory.places.memory
            or node in memory.placement.written
            or node in memory.placement.reshaped
            or node in memory.placement.replaced
            or node in memory.placement.gathered
        ):
            found.update(storages_of(node))
        elif isinstance(value, (list, tuple)):
            named = [result_name(node, at) in memory.places.memory for at in range(len(value))]
            found.update(n for item, is_named in zip(value, named, strict=True) if is_named for n in storages(item))
    return found


def _results(memory: MemoryPlan, node: fx.Node) -> list[str]:
    """The names of what a call computes into fixed places."""
    if node not in memory.places.out_variants:
        return []
    value = node.meta["val"]
    return [node.name] if isinstance(value, torch.Tensor) else [result_name(node, at) for at in range(len(value))]


def _replaceable(memory: MemoryPlan, instruction: Instruction, piece: Hashable) -> tuple[Hashable, ...]:
    """The arguments whose memory the result of a pointwise operator may reuse: those with its geometry.

    An argument that is there twice, once under another shape, is read in another order than it would be written. A
    bucket may be on the wire, and neither takes a place nor gives its own.
    """
    if not isinstance(instruction, Compute) or isinstance(piece, tuple):
        return ()
    node, named = instruction.node, memory.places.named
    if _results(memory, node) != [node.name] or not memory.places.out_variants[node].pointwise:
        return ()
    found: dict[Hashable, list[Place | None]] = {}
    for argument in node.all_input_nodes:
        if (other := memory.piece_of(argument)) is not None:
            found.setdefault(other, []).append(named.get(memory.value_of(argument).name))
    own = _geometry_of(named[node.name])
    return tuple(
        other
        for other, places in found.items()
        if not isinstance(other, tuple)
        and other != piece
        and all(place and _geometry_of(place) == own for place in places)
    )


def _geometry_of(place: Place) -> tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]:
    return place.shape, place.stride, place.offset, place.dtype


def names_of_pieces(named: Mapping[str, Place]) -> dict[Hashable, str]:
    """For each piece of memory that holds values, the name of the first one."""
    names: dict[Hashable, str] = {}
    for name, place in named.items():
        names.setdefault(place.memory, name)
    return names


def blocks_text(blocks: Iterable[tuple[str, int, int]]) -> str:
    """How large the block of each device is.

    Args:
        blocks: device, size in bytes, and the most bytes that are in use there at once.
    """
    texts = (
        f"{format_bytes(size)} on {device}, of which {format_bytes(needed)} are in use at once"
        for device, size, needed in blocks
    )
    return "; ".join(texts) or "none"
