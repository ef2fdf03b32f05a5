"""Write how buckets are packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fdp.emit.codegen.lines import Line, ProgramPart
from fdp.emit.codegen.writer import Writer, bind_operator, literal
from fdp.emit.memory.instructions import Divide, Pack
from fdp.emit.memory.planning import slot_name

_aten = torch.ops.aten


def write_packing(writer: Writer, pack: Pack) -> None:
    """Write copies of members into their bucket; those that need no division are copied by one call."""
    slots = [slot_name(pack.bucket, member) for member in pack.members]
    markers = [writer.memory.markers[pack.bucket][member] for member in pack.members]
    if pack.bucket in writer.memory.places.scaled or len(slots) == 1:
        for slot, marker in zip(slots, markers, strict=True):
            _write_copy(writer, pack.bucket, slot, marker)
        return
    sources: list[Any] = [marker.args[0] for marker in markers]
    uses = set(slots)
    pieces = ", ".join(literal(writer, source, uses) for source in sources)
    call = bind_operator(writer, _aten._foreach_copy_.default, (sources, sources))
    writer.lines.append(Line(f"{call}([{', '.join(slots)}], [{pieces}])", uses, part=ProgramPart("pack", pack.bucket)))


def _write_copy(writer: Writer, bucket: int, slot: str, marker: fx.Node) -> None:
    """Write the copy of a member into its bucket, divided if the bucket is scaled."""
    uses, part = {slot}, ProgramPart("pack", bucket)
    source: Any = marker.args[0]
    text = literal(writer, source, uses)
    if bucket in writer.memory.places.scaled:
        share = writer.memory.share_of(marker)
        call = bind_operator(writer, _aten.mul.out, (source, share), {"out": source})
        writer.lines.append(Line(f"{call}({text}, {share!r}, out={slot})", uses, part=part))
    else:
        call = bind_operator(writer, _aten.copy_.default, (source, source))
        writer.lines.append(Line(f"{call}({slot}, {text})", uses, part=part))


def write_division_in_bucket(writer: Writer, divide: Divide) -> None:
    """Write the division of a member that was computed in its bucket."""
    marker = writer.memory.markers[divide.bucket][divide.member]
    write_division(writer, marker, slot_name(divide.bucket, divide.member), ProgramPart("pack", divide.bucket))


def write_division(writer: Writer, marker: fx.Node, name: str, part: ProgramPart | None = None) -> None:
    """Write the division of a marker's value in its bucket, by its name there."""
    share = writer.memory.share_of(marker)
    call = bind_operator(writer, _aten.mul_.Tensor, (marker.args[0], share))
    writer.lines.append(Line(f"{call}({name}, {share!r})", {name}, part=part))
