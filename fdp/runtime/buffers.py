"""The tensors of a program in given blocks of memory: values at fixed places, and buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from fdp.distributed.by_collective import FlatMessage, arriving_shape, pretend_message, start_collective
from fdp.distributed.group import Group
from fdp.distributed.other_ranks import OtherRanks
from fdp.distributed.sending import Arrived
from fdp.emit.codegen.loop_bodies import blocks_of_body
from fdp.emit.codegen.program import Program
from fdp.emit.memory.message_memory import (
    arrives_at_bytes,
    header_numel,
    received_at_bytes,
    received_numel,
    shared_numel,
)
from fdp.emit.memory.planning import Place
from fdp.plan import Bucket, Plan
from fdp.runtime.diagnostics import bucket_text
from fdp.runtime.frames import Frame, named_frame, plain_frame
from fdp.runtime.two_levels import TwoLevelReduction
from fdp.runtime.wide_mean import WideMean


class Stages(Protocol):
    """A bucket under way that takes several messages, one after the other."""

    def turn(self) -> None:
        """Wait for the first message, and start the second one; later do nothing."""

    def finish(self) -> None:
        """Wait until the result is there."""


@dataclass(frozen=True)
class Buffer:
    """One bucket in memory.

    Attributes:
        bucket: its description.
        own: what this rank contributes, flat; the result is in the same place unless it arrives elsewhere.
        arriving: memory for what arrives, where it lies apart: [ranks, numel] for an all-gather, [ranks, numel /
            ranks] for an all-to-all, the same or two rows less for a reduce-scatter, [numel] for a permutation; else
            None, as well where the program says at each call where it goes.
        result: [numel / ranks], of a reduce-scatter; else None.
        scaled: it is packed with values divided by the number of ranks: their sum is the mean.
        received: of a bucket that takes several messages: memory for what arrives between them; else None.
        message: what is sent of a reduction: `own`, with the header behind it if there is one.
        header: [header_numel], the end of the message, if the bucket says which call it belongs to; else None.
        frame: in which its messages start.
    """

    bucket: Bucket
    own: torch.Tensor
    arriving: torch.Tensor | None
    result: torch.Tensor | None
    scaled: bool
    received: torch.Tensor | None = None
    message: torch.Tensor | None = None
    header: torch.Tensor | None = None
    frame: Frame = plain_frame

    def start(
        self, group: Group, arrived: Arrived | None = None, into: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """Start the collective; a gathered value goes to `into` if that is given.

        Returns:
            The function that waits for it.
        """
        return cast(Callable[[], None], self.frame(self._start, group, arrived, into))

    def _start(self, group: Group, arrived: Arrived | None, into: torch.Tensor | None) -> Callable[[], None]:
        sent = self._sent(self.own if self.message is None else self.message, into)
        return start_collective(sent, group.along(self.bucket.along), arrived)

    def start_stages(self, group: Group, arrived: Arrived | None = None) -> Stages:
        """Start the first of several messages: of a mean in a wider dtype, or of a reduction in two levels."""
        ranks, wide = group.along(self.bucket.along), self.bucket.accumulate_dtype
        if wide is not None:
            return cast(Stages, self.frame(WideMean, self.own, self.received, wide, ranks, arrived, self.frame))
        op = "sum" if self.scaled else self.bucket.op
        return cast(Stages, self.frame(TwoLevelReduction, self.own, self.received, op, ranks, arrived, self.frame))

    def _sent(self, own: torch.Tensor, into: torch.Tensor | None) -> FlatMessage:
        """What is sent, with or without the header; a gathered value goes to `into` if that is given."""
        return FlatMessage(self.bucket, own, self._arriving(into), self.result, self.scaled)

    def _arriving(self, into: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor for what arrives, if it is separate from what is sent."""
        return self.arriving if into is None else into.view(-1, self.own.numel())

    def pretend(self, others: OtherRanks, into: torch.Tensor | None = None) -> None:
        """Compute what the collective would, with assumed values of the other ranks."""
        pretend_message(self._sent(self.own, into), others.along(self.bucket.along))


def place_values(program: Program, blocks: Mapping[torch.device, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make the tensors at the fixed places of a program, by name."""
    typed: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    at = {memory: (device, offset) for device, x in program.layouts.items() for memory, offset in x.offsets.items()}
    made = {}
    for name, place in program.places.items():
        if place.memory in at:  # not: a value that turned out not to be used
            device, offset = at[place.memory]
            made[name] = _tensor(place, offset, device, blocks, typed)
    return made


def all_place_values(
    program: Program, blocks: Mapping[torch.device, torch.Tensor]
) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """The same for a program and the bodies of its loops: each function, with the tensors that it reads by name."""
    yield program.function, place_values(program, blocks)
    for node, body in program.loops.items():
        yield body.function, place_values(body, blocks_of_body(node, body, program, blocks))


def _tensor(
    place: Place,
    offset_bytes: int,
    device: torch.device,
    blocks: Mapping[torch.device, torch.Tensor],
    typed: dict[tuple[torch.device, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    block = typed.get((device, place.dtype))
    if block is None:
        whole = blocks[device]
        whole = whole[: whole.numel() // place.dtype.itemsize * place.dtype.itemsize]
        block = typed[device, place.dtype] = whole.view(place.dtype)
    start = (offset_bytes + place.start_bytes) // place.dtype.itemsize + place.offset
    return block.as_strided(place.shape, place.stride, block.storage_offset() + start)


def make_buffers(plan: Plan, program: Program, blocks: Mapping[torch.device, torch.Tensor]) -> dict[int, Buffer]:
    """Make the buckets of a program in its memory, by index."""
    buffers = {}
    for bucket in plan.buckets:
        size = plan.trace.ranks_along(bucket.along)
        layout = program.layouts.get(bucket.device)
        if layout is None or ("bucket", bucket.index) not in layout.offsets:
            continue
        block, start = blocks[bucket.device], layout.offsets["bucket", bucket.index]
        numel = shared_numel(bucket, size) if bucket.has_stages else bucket.numel
        own = _flat(block, start, numel, bucket.dtype)
        arriving = result = received = message = header = None
        if not bucket.collective.in_place and bucket.index not in program.gathered:
            shape, at = arriving_shape(bucket, size), layout.offsets["result", bucket.index]
            if bucket.collective.scatters:
                result = _flat(block, at, bucket.row_numel, bucket.dtype)
                at = start + arrives_at_bytes(bucket)
            arriving = _flat(block, at, math.prod(shape), bucket.dtype).view(shape)
        if bucket.has_stages:
            at = start + received_at_bytes(bucket, size)
            received = _flat(block, at, received_numel(bucket, size), bucket.dtype)
        if extra := header_numel(bucket, size):
            message = own if bucket.has_stages else _flat(block, start, numel + extra, bucket.dtype)
            header = message[bucket.numel : bucket.numel + extra]
        scaled = bucket.index in program.scaled
        frame = named_frame(f"fdp: {bucket_text(plan, bucket.index)}")
        buffers[bucket.index] = Buffer(bucket, own, arriving, result, scaled, received, message, header, frame)
    return buffers


def _flat(block: torch.Tensor, start_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return block[start_bytes : start_bytes + numel * dtype.itemsize].view(dtype)
