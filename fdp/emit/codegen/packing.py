"""Write how buckets are filled: each gradient as soon as it is there, so that its own memory can be given back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.emit.codegen.lines import Line, Part
from fdp.emit.codegen.writer import Writer, bind_operator, bucket_name, literal
from fdp.emit.memory.planning import slot_name
from fdp.plan import Bucket
from fdp.trace.effects import effects_of, is_marker, lanes_of, storages_of

_aten = torch.ops.aten

_EARLY_FROM_BYTES = 2**16
"""Smaller members wait, and are copied together when the bucket starts: their memory matters less than a call each."""


@dataclass(frozen=True)
class Filling:
    """A member of a bucket that is copied into it as soon as it is there.

    Attributes:
        bucket: the bucket.
        slot: the name of its place.
        source: the node to copy.
        views: what has to be looked through to see it, in order.
    """

    bucket: int
    slot: str
    source: fx.Node
    views: tuple[fx.Node, ...]


def early_fillings(writer: Writer) -> dict[fx.Node, list[Filling]]:
    """Find the members that can be copied into their buckets early: by the operator call that makes each."""
    found: defaultdict[fx.Node, list[Filling]] = defaultdict(list)
    for bucket, markers in writer.markers.items():
        for at, marker in enumerate(markers):
            source: Any = marker.args[0]
            value = source.meta["val"]
            if marker in writer.places.direct or value.numel() * value.itemsize < _EARLY_FROM_BYTES:
                continue
            views: list[fx.Node] = []
            maker = source
            while effects_of(maker).view and maker.op == "call_function":
                views.insert(0, maker)
                maker = maker.args[0]
            changed = any(storage in writer.accesses.writes for storage in storages_of(source))
            if maker.op == "call_function" and not is_marker(maker) and lanes_of(maker) is None and not changed:
                found[maker].append(Filling(bucket, slot_name(bucket, at), source, tuple(views)))
    return found


def write_copy(writer: Writer, filling: Filling) -> None:
    """Copy a member into its bucket, and divide it on the way if that is due."""
    uses, source, part = {filling.slot}, filling.source, Part("pack", filling.bucket)
    text = literal(writer, source, uses)
    if filling.bucket in writer.places.scaled:
        share = 1 / writer.plan.trace.world_size
        call = bind_operator(writer, _aten.mul.out, (source, share), {"out": source})
        writer.lines.append(Line(f"{call}({text}, {share!r}, out={filling.slot})", uses, part=part))
    else:
        call = bind_operator(writer, _aten.copy_.default, (source, source))
        writer.lines.append(Line(f"{call}({filling.slot}, {text})", uses, part=part))


def write_division(writer: Writer, marker: fx.Node, name: str, part: Part | None = None) -> None:
    """Divide what was computed for a marker in its bucket, where it has a name."""
    share = 1 / writer.plan.trace.world_size
    call = bind_operator(writer, _aten.mul_.Tensor, (marker.args[0], share))
    writer.lines.append(Line(f"{call}({name}, {share!r})", {name}, part=part))


def write_start(writer: Writer, bucket: Bucket, filled: AbstractSet[str]) -> None:
    """Fill what is missing in a bucket, and start it."""
    divided = set(writer.places.divided.values())
    missing: list[Filling] = []
    for at, marker in enumerate(writer.markers[bucket.index]):
        slot, source = slot_name(bucket.index, at), marker.args[0]
        assert isinstance(source, fx.Node)
        if marker not in writer.places.direct:
            if slot not in filled:
                missing.append(Filling(bucket.index, slot, source, ()))
        elif bucket.index in writer.places.scaled and marker not in divided:
            write_division(writer, marker, slot, Part("pack", bucket.index))
    if bucket.index in writer.places.scaled or len(missing) == 1:
        for filling in missing:
            write_copy(writer, filling)
    elif missing:
        uses = {filling.slot for filling in missing}
        pieces = ", ".join(literal(writer, filling.source, uses) for filling in missing)
        sources = [filling.source for filling in missing]
        call = bind_operator(writer, _aten._foreach_copy_.default, (sources, sources))
        slots = ", ".join(filling.slot for filling in missing)
        writer.lines.append(Line(f"{call}([{slots}], [{pieces}])", uses, part=Part("pack", bucket.index)))
    text = f"{writer.reserved['start']}({bucket.index})"
    writer.lines.append(Line(text, {bucket_name(bucket.index)}, part=Part("start", bucket.index)))
