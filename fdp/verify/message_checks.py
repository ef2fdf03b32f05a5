"""The messages of a program: what each has to carry, and that each starts and is waited for in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from fdp.plan.plan import Bucket, Plan, Start, Wait
from fdp.trace.trace import Trace
from fdp.verify.bucket_memory import bucket_parts
from fdp.verify.combined import IN_PLACE, SPLIT, STACKED, OwnRank, combination_in, shape_of
from fdp.verify.extents import extent_of
from fdp.verify.failure import VerificationError
from fdp.verify.memory import Block, Memory, View
from fdp.verify.program_protocol import ProgramProtocol
from fdp.verify.terms import Term, term_text
from fdp.verify.values import Values


class Expected(Protocol):
    """The values of a trace that messages carry.

    Attributes:
        markers: for each reduction, by the name of its node, what it computes.
        shares: for each value whose mean is taken, divided by the number of ranks, and the dimension along which it is
            taken, the value itself.
    """

    markers: dict[str, Term]
    shares: dict[tuple[Term, str], Term]


class RunningProgram(Protocol):
    """The part of a program's run that the checks of messages read.

    Attributes:
        values: makes terms.
        memory: what it reads and writes.
        arena: for each device, the memory that its places are in.
        where: for each piece of that memory, the device, and where it begins.
    """

    values: Values
    memory: Memory
    arena: dict[torch.device, Block]
    where: dict[Any, tuple[torch.device, int]]


class Messages:
    """The messages of a program: what they carry, and that each starts and is waited for in its turn.

    Args:
        trace: that it was written for.
        plan: likewise; None for the body of a loop, which sends nothing.
        program: it.
        reference: the trace, carried out.
        communicates: whether messages are sent, other than those whose results lie apart.
    """

    def __init__(
        self, trace: Trace, plan: Plan | None, program: ProgramProtocol, reference: Expected, communicates: bool
    ) -> None:
        self._trace, self._program, self._reference = trace, program, reference
        buckets = () if plan is None else plan.buckets
        self._buckets = {b.index: b for b in buckets if communicates or b.op not in IN_PLACE}
        schedule = () if plan is None else plan.schedule
        self._order = [
            ("start" if isinstance(item, Start) else "wait", item.bucket)
            for item in schedule
            if isinstance(item, (Start, Wait)) and item.bucket in self._buckets
        ]
        self._done: list[tuple[str, int]] = []
        self._sent: dict[int, list[tuple[View, Term]]] = {}
        self._into: dict[int, View] = {}

    def start(self, execution: RunningProgram, index: int, into: View | None = None) -> None:
        """Record the content of a bucket; it is on the wire from here on."""
        bucket = self._next("start", index)
        if (into is not None) != (index in self._program.gathered):
            raise VerificationError(f"it is not said right where what bucket {index} gathers goes")
        if into is not None:
            self._into[index] = into
        for at, member in enumerate(bucket.members):
            reduction = self._trace.reductions[member]
            slot, result = self._slot_and_result(execution, bucket, at)
            term = execution.values.read(slot)
            how = combination_in(bucket)
            if index in self._program.scaled:
                # A sum of shares of 1/N is a mean.
                whole = self._reference.shares.get((term, how.along)) or execution.values.unshared(term, how.along)
                op, term = ("sum", term) if whole is None else ("mean", whole)
                how = replace(how, op=op)
            sent = execution.values.combined(how, term)
            expected = self._reference.markers[self._trace.operations[reduction.operation].node]
            if sent is not expected:
                raise VerificationError(
                    f"bucket {index} sends {term_text(sent)} for {reduction.name}, not {term_text(expected)}"
                )
            self._sent.setdefault(index, []).append((result, sent))
        for block, start, size in self._regions(execution, bucket):
            execution.memory.take_off(block, start, size)

    def wait(self, execution: RunningProgram, index: int) -> None:
        """Put the results into memory."""
        bucket = self._next("wait", index)
        for block, start, size in self._regions(execution, bucket):
            execution.memory.land(block, start, size)
        for result, term in self._sent.pop(index):
            execution.memory.write(result, term)

    def missing(self) -> Iterator[str]:
        """The starts and waits that did not happen."""
        left = self._order[len(self._done) :]
        if left:
            yield "these did not happen: " + ", ".join(f"{what} of bucket {index}" for what, index in left)
        for index in self._buckets:
            if self._order.count(("start", index)) != 1 or self._order.count(("wait", index)) != 1:
                yield f"the plan does not start and wait for bucket {index} once each"
        starts = [index for what, index in self._order if what == "start"]
        if starts != sorted(starts):
            yield f"the plan starts buckets in the order {starts}; all ranks start them in that of their numbers"

    def _next(self, what: str, index: int) -> Bucket:
        expected = self._order[len(self._done)] if len(self._done) < len(self._order) else None
        if expected != (what, index):
            planned = "nothing" if expected is None else f"the {expected[0]} of bucket {expected[1]}"
            raise VerificationError(f"{what} of bucket {index}, where the plan has {planned}")
        self._done.append((what, index))
        return self._buckets[index]

    def _regions(self, execution: RunningProgram, bucket: Bucket) -> Iterator[tuple[Block, int, int]]:
        """The bytes that a message reads or writes."""
        parts = bucket_parts(bucket, self._size_of(bucket))
        if (into := self._into.get(bucket.index)) is not None:
            parts = replace(parts, result=0)
            yield into.block, into.start, into.span
        for kind, begin, size in parts.regions():
            device, start = self._memory_of(execution, bucket, kind)
            if start + begin + size > self._program.layouts[device].size_bytes:
                raise VerificationError(f"bucket {bucket.index} lies beyond the memory of the step")
            yield execution.arena[device], start + begin, size

    def _size_of(self, bucket: Bucket) -> int:
        """The number of ranks that exchange a bucket."""
        return OwnRank(0, self._trace.world_size, self._trace.dimensions).along(bucket.along).size

    def _memory_of(self, execution: RunningProgram, bucket: Bucket, kind: str) -> tuple[torch.device, int]:
        """The device of a bucket's memory, or of its result's, and where it begins."""
        if (kind, bucket.index) not in execution.where:
            what = "the result of " * (kind == "result")
            raise VerificationError(f"{what}bucket {bucket.index} has no memory")
        return execution.where[kind, bucket.index]

    def _slot_and_result(self, execution: RunningProgram, bucket: Bucket, at: int) -> tuple[View, View]:
        """Where a member of a bucket is sent from, and where its result arrives."""
        device, start = self._memory_of(execution, bucket, "bucket")
        shape, offset = self._trace.reductions[bucket.members[at]].shape, bucket.offsets[at]
        steps: tuple[Any, ...] = ()
        numel = 1
        for size in reversed(shape):
            steps = (numel, *steps)
            numel *= size
        size, itemsize = self._size_of(bucket), bucket.dtype.itemsize
        row = bucket.numel
        if bucket.op in SPLIT:
            # Each rank's row has its part of every member.
            if shape[0] != size or bucket.numel % size:
                raise VerificationError(f"bucket {bucket.index} has no row for each of {size} ranks")
            row, numel = bucket.numel // size, numel // size
            steps = (row, *steps[1:])
        if offset + numel > row:
            raise VerificationError(f"a member lies behind the end of bucket {bucket.index}")
        block, begin = execution.arena[device], start + offset * itemsize
        slot = _view(block, begin, tuple(shape), steps, bucket.dtype)
        if bucket.op in IN_PLACE:
            return slot, slot
        own = steps[1:] if bucket.op in SPLIT else steps
        back = (row, *own) if bucket.op in STACKED else own
        into = self._into.get(bucket.index)
        if into is None:
            begin = self._memory_of(execution, bucket, "result")[1] + offset * itemsize
        else:
            block, begin = into.block, into.start
        result = _view(block, begin, shape_of(bucket.op, tuple(shape), size), back, bucket.dtype)
        if into is not None and (into != result or bucket.op != "all_gather" or row != numel):
            raise VerificationError(f"what bucket {bucket.index} gathers does not fit where it is to go")
        return slot, result


def _view(block: Block, start: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> View:
    extent = extent_of(shape, stride)
    span = extent.span * dtype.itemsize
    return View(block, start, extent.shape, extent.stride, dtype, span, extent.numel, extent.dense)
