"""The memory map of a program: address and lifetime of each piece of memory, as a value, a table and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdp.emit.codegen.program import Program
from fdp.emit.memory.allocation import blocks_text, names_of_pieces
from fdp.emit.memory.map_picture import draw_map
from fdp.plan import Plan
from fdp.tables import Printed, Table, count, cut_short, format_bytes, short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 24


@dataclass(frozen=True, repr=False)
class Piece:
    """A piece of memory.

    Attributes:
        name: of the first value in it, as the program calls it; or "bucket 0", or "memory of" a loop.
        source: the user's line that computes it; empty if there is none.
        device: where it is.
        size_bytes: its size.
        offset_bytes: where it begins in the block of its device.
        first: the instruction of the program that uses it first, counted from 0.
        last: the instruction that uses it last.
        bucket: the index of the bucket that it is; None if it is none.
    """

    name: str
    source: str
    device: str
    size_bytes: int
    offset_bytes: int
    first: int
    last: int
    bucket: int | None = None

    def __repr__(self) -> str:
        size, when = format_bytes(self.size_bytes), f"instructions {self.first} to {self.last}"
        return f"<Piece {cut_short(self.name)}: {size} on {self.device} at {self.offset_bytes}, {when}>"


@dataclass(frozen=True, repr=False)
class MemoryMap(Printed):
    """The memory that a program holds from call to call, piece by piece.

    Attributes:
        name: of the step.
        pieces: what lies in it, in the order of first use.
        size_bytes: device and size of each block.
        needed_bytes: device, and the most that is in use there at once; no layout is smaller.
    """

    name: str
    pieces: tuple[Piece, ...]
    size_bytes: tuple[tuple[str, int], ...]
    needed_bytes: tuple[tuple[str, int], ...]

    @property
    def instructions(self) -> int:
        """How many instructions there are up to the last that uses memory of it."""
        return max((piece.last + 1 for piece in self.pieces), default=0)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw each piece as a rectangle, address against time: buckets in colours, values in grey.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        return draw_map(self.name, "memory", self.size_bytes, self.needed_bytes, self.pieces, path)

    def __repr__(self) -> str:
        total = format_bytes(sum(size for _, size in self.size_bytes))
        return f"<MemoryMap of {short_name(self.name)}: {count(len(self.pieces), 'piece')}, {total}>"

    def __str__(self) -> str:
        needed = dict(self.needed_bytes)
        blocks = blocks_text((device, size, needed[device]) for device, size in self.size_bytes)
        table = Table(
            f"Memory of {self.name}: {blocks}",
            ("value", "bytes", "begins at", "used from", "to", "computed in"),
        )
        largest = sorted(self.pieces, key=lambda piece: -piece.size_bytes)[:_MOST_ROWS]
        for piece in (piece for piece in self.pieces if piece in largest):
            table.add(piece.name, piece.size_bytes, piece.offset_bytes, piece.first, piece.last, piece.source)
        rest = len(self.pieces) - len(largest)
        return f"{table}\n... and {count(rest, 'smaller piece')}" if rest else str(table)


def memory_map(plan: Plan, program: Program) -> MemoryMap:
    """The memory map of a program.

    Args:
        plan: that it carries out.
        program: of the plan.

    Returns:
        The map.
    """
    names = names_of_pieces(program.places)
    pieces = []
    for device, layout in program.layouts.items():
        for piece in layout.pieces:
            name = names.get(piece.key, "")
            node = plan.trace.nodes.get(name) or plan.trace.nodes.get(name.rpartition("_result")[0])
            bucket = None
            match piece.key:
                case ("bucket" | "result" as kind, int(index)):
                    bucket = index
                    name, node = f"{'result of ' * (kind == 'result')}bucket {bucket}", None
                case ("loop", loop, _):
                    name, node = f"memory of {loop}", None
            source = "" if node is None else str(node.meta.get("source") or "")
            offset = layout.offsets[piece.key]
            pieces.append(Piece(name, source, str(device), piece.size_bytes, offset, piece.first, piece.last, bucket))
    layouts = [(str(device), layout) for device, layout in program.layouts.items()]
    return MemoryMap(
        plan.trace.name,
        tuple(sorted(pieces, key=lambda piece: (piece.device, piece.first))),
        tuple((device, layout.size_bytes) for device, layout in layouts),
        tuple((device, layout.needed_bytes) for device, layout in layouts),
    )
