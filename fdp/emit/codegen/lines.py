"""The lines of a generated program: what they use and define, and where names are deleted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fdp.emit.memory.layout import Layout
from fdp.tables import format_bytes


@dataclass(frozen=True)
class ProgramPart:
    """The part of a program that a line belongs to: one item of the plan's schedule.

    Attributes:
        kind: "run" (an operation), "pack" (packing a bucket), "start" or "wait".
        index: for "run" the position in `Plan.schedule` (-1 before all of it), else the bucket.
    """

    kind: str
    index: int


BEFORE = ProgramPart("run", -1)


@dataclass
class Line:
    """One statement.

    Attributes:
        text: the statement.
        uses: names of values that it reads or changes.
        defines: local names that it gives.
        pure: it does nothing but give its names values: without a reader it can be left out.
        part: the part of the program that it belongs to; None if not set.
    """

    text: str
    uses: set[str]
    defines: tuple[str, ...] = ()
    pure: bool = False
    part: ProgramPart | None = None


def drop_unused(lines: Sequence[Line], outputs: Iterable[str]) -> list[Line]:
    """Drop pure lines whose names no later line needs, such as views of fixed places."""
    needed = set(outputs)
    kept = []
    for line in reversed(lines):
        if not line.pure or needed.intersection(line.defines):
            needed |= line.uses
            kept.append(line)
    return kept[::-1]


def assign_part(lines: Iterable[Line], part: ProgramPart) -> None:
    """Set the part of the lines that have none."""
    for line in lines:
        line.part = line.part or part


def parts_of(lines: Iterable[Line]) -> tuple[ProgramPart, ...]:
    """The parts of a program, in order; each once where its lines follow each other."""
    return tuple(part or BEFORE for part, _ in itertools.groupby(line.part for line in lines))


def assemble(
    lines: Sequence[Line],
    inputs: Sequence[str],
    outputs: Sequence[str],
    bound: Mapping[str, Any],
    fixed: Iterable[str],
    layouts: Mapping[torch.device, Layout],
    reserved: Mapping[str, str],
    tick: str | None = None,
) -> str:
    """Join the lines of a program, and delete each name after its last use.

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
