"""The lines of a generated program: what they need, when values are dropped, where memory can be shared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from fdp.emit.memory.layout import Layout, Lifetime, lay_out
from fdp.tables import format_bytes


@dataclass(frozen=True)
class Part:
    """What a line of a program is there for.

    Attributes:
        kind: "run" (an operation), "pack" (filling a bucket), "start" or "wait".
        index: for "run" the position in `Plan.schedule` (-1 before all of it), else the bucket.
    """

    kind: str
    index: int


BEFORE = Part("run", -1)


@dataclass
class Line:
    """One statement.

    Attributes:
        text: the statement.
        uses: names of values that it reads or changes.
        defines: local names that it gives.
        pure: it does nothing but give its names values: without a reader it can be left out.
        may_replace: names of values whose place its result may take.
        part: what it is there for, if that is known.
    """

    text: str
    uses: set[str]
    defines: tuple[str, ...] = ()
    pure: bool = False
    may_replace: tuple[str, ...] = ()
    part: Part | None = None


def drop_unused(lines: Sequence[Line], outputs: Iterable[str]) -> list[Line]:
    """Leave out what only led to values that are not needed, such as views of fixed places."""
    needed = set(outputs)
    kept = []
    for line in reversed(lines):
        if not line.pure or needed.intersection(line.defines):
            needed |= line.uses
            kept.append(line)
    return kept[::-1]


def lay_out_lines(
    lines: Sequence[Line],
    memory_of: Mapping[str, Any],
    sizes: Mapping[Any, tuple[torch.device, int]],
    shared: bool = True,
) -> dict[torch.device, Layout]:
    """Place every piece of memory that a program uses.

    Args:
        lines: of the program.
        memory_of: for each name of a value at a fixed place, the piece that it is in.
        sizes: device and size in bytes of each piece.
        shared: whether pieces that are not needed at the same time may share memory.

    Returns:
        A layout for each device.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    replaceable: dict[Any, tuple[Any, ...]] = {}
    for index, line in enumerate(lines):
        for name in sorted(line.uses):  # the same layout in every process, whatever its seed of hashes
            if (memory := memory_of.get(name)) is not None:
                if memory not in first:
                    first[memory] = index
                    replaceable[memory] = tuple(memory_of[other] for other in line.may_replace)
                last[memory] = index
    pieces: dict[torch.device, list[Lifetime]] = {}
    for memory, index in first.items():
        device, size_bytes = sizes[memory]
        # A bucket may be on the wire, and has a place of its own.
        inherits = () if isinstance(memory, tuple) else replaceable[memory]
        inherits = tuple(other for other in inherits if not isinstance(other, tuple) and other != memory)
        lifetime = Lifetime(memory, size_bytes, index, last[memory], inherits)
        if not shared:
            lifetime = Lifetime(memory, size_bytes, 0, len(lines))
        pieces.setdefault(device, []).append(lifetime)
    return {device: lay_out(found) for device, found in pieces.items()}


def belongs(lines: Iterable[Line], part: Part) -> None:
    """Say what lines are there for, unless it has been said."""
    for line in lines:
        line.part = line.part or part


def parts_of(lines: Iterable[Line]) -> tuple[Part, ...]:
    """The parts of a program, in order; each once where its lines follow each other."""
    return tuple(part or BEFORE for part, _ in itertools.groupby(line.part for line in lines))


def assemble(
    lines: Sequence[Line],
    inputs: Sequence[str],
    outputs: Sequence[str],
    bound: Mapping[str, Any],
    fixed: AbstractSet[str],
    layouts: Mapping[torch.device, Layout],
    reserved: Mapping[str, str],
    tick: str | None = None,
) -> str:
    """Put a program together, and after each line the names that are not needed any more.

    Args:
        lines: of the program.
        inputs: names of its inputs, in order.
        outputs: names of what it returns, in order.
        bound: objects that it uses, by name.
        fixed: names of values at fixed places, which are never dropped.
        layouts: of their memory.
        reserved: what it calls its parameters "inputs", "start" and "wait".
        tick: what it calls at its beginning and at the end of each part, to have them timed; None for nothing.

    Returns:
        The text of a function `step`.
    """
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        for name in (*line.uses, *line.defines):
            last[name] = index
    keep = {*outputs, *bound, *fixed}
    body = [
        f"# values at fixed places: {format_bytes(layout.size_bytes)} on {device}, of which "
        f"{format_bytes(layout.needed_bytes)} are in use at once"
        for device, layout in layouts.items()
    ]
    if inputs:
        given = reserved["inputs"]
        body += [f"({', '.join(inputs)},) = {given}", f"{given}.clear()"]
        unused = [name for name in inputs if name not in last and name not in keep]
        if unused:
            body.append("del " + ", ".join(unused))
    if tick is not None:
        body.append(f"{tick}()")
    for index, line in enumerate(lines):
        body.append(line.text)
        dead = sorted(n for n in line.uses.union(line.defines) if last[n] == index and n not in keep)
        if dead:
            body.append("del " + ", ".join(dead))
        if tick is not None and (index + 1 == len(lines) or lines[index + 1].part != line.part):
            body.append(f"{tick}()")
    body.append(f"return [{', '.join(outputs)}]")
    # Operators as default values: a local name is the cheapest thing to look up.
    defaults = ", ".join(f"{name}={name}" for name in bound)
    parameters = ", ".join(reserved[stem] for stem in ("inputs", "start", "wait"))
    head = f"def step({parameters}{', *, ' + defaults if defaults else ''}):"
    return "\n    ".join([head, *body]) + "\n"
