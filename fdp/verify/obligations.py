"""What has to hold of a program: that it computes what its trace says, and leaves memory as it should be left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fdp.errors import build_message
from fdp.plan.record import Bucket, Plan, Start, Wait
from fdp.trace.record import Trace
from fdp.verify.execution import Execution
from fdp.verify.extents import extent_of
from fdp.verify.failure import VerificationError
from fdp.verify.memory import Block, View, view_of
from fdp.verify.program import Program
from fdp.verify.reference import Reference
from fdp.verify.terms import Term, describe

_ALIGNMENT_BYTES = 64


def verify_program(
    plan: Plan, program: Program, rank: int, communicates: bool, tick: Callable[[], None] | None = None
) -> None:
    """Prove that a program computes what the trace of its plan says, whatever the numbers are.

    Args:
        plan: that it was written for.
        program: to run operator by operator.
        rank: this process's.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        tick: what the program calls to be timed, if it does; it is not called.

    Raises:
        VerificationError: it does not, or it cannot be followed; names the first line that goes wrong.
    """
    with _plain_context(), _without_collections():
        _verify(plan.trace, plan, program, Reference(plan.trace, rank), communicates, tick)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Terms refer to older terms alone and are soon gone; a search for cycles among all objects of torch and the trace
    would take longer than the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _plain_context() -> Iterator[None]:
    """Steps run without autocast and inference mode, whatever is on around the call."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.no_grad())  # to leave inference mode switches gradients on
        yield


def _verify(
    trace: Trace,
    plan: Plan | None,
    program: Program,
    reference: Reference,
    communicates: bool,
    tick: Callable[[], None] | None,
) -> None:
    messages = _Messages(trace, plan, program, reference, communicates)
    execution = Execution(reference, program, messages, tick)
    try:
        outputs = execution.run()
    except VerificationError as error:
        raise _failure(trace, execution, [str(error)]) from error
    offenders = [
        *messages.missing(),
        *_wrong_outputs(trace, execution, outputs),
        *_wrong_memory(trace, execution, outputs),
        *_reshaped(execution),
    ]
    if execution.drawn is not reference.drawn:
        offenders.append("random numbers are not drawn by the same operators in the same order")
    if offenders:
        raise _failure(trace, execution, offenders)
    for name, body in reference.bodies.items():
        _verify(body.trace, None, program.loops[name], body, False, None)


def _failure(trace: Trace, execution: Execution, offenders: list[str]) -> VerificationError:
    suspect = execution.suspect
    if suspect is not None:
        where = execution.text(suspect.line)
        offenders = [f"first at {where}: it computes {suspect.call}, which the trace does not", *offenders]
    return VerificationError(
        build_message(
            f"the program of step {trace.name!r} does not compute what its trace says.",
            offenders,
            remedy="report this to the authors of fdp, with the step.",
        )
    )


def _wrong_outputs(trace: Trace, execution: Execution, outputs: list[torch.Tensor]) -> Iterator[str]:
    reference = execution.reference
    named = [output for output in trace.outputs if output.node is not None]
    if len(outputs) != len(reference.outputs):
        yield f"it returns {len(outputs)} tensors in place of {len(reference.outputs)}"
        return
    donated = {at for at, item in enumerate(trace.inputs) if item.donated}
    owners: dict[Block, int] = {}
    for at, (output, tensor) in enumerate(zip(named, outputs, strict=True)):
        expected, term = reference.outputs[at]
        found = execution.view(tensor)
        value = execution.values.read(found)
        if value is not term:
            yield f"{output.name} is {describe(value)}, not {describe(term)}"
        own = None if output.slot is None else execution.inputs[output.slot]
        # A value that is repeated, or has gaps, need not be returned so: it may be a copy.
        free = tensor is own or not expected.dense
        lies_right = (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if not lies_right or not (free or found.stride == expected.stride):
            yield f"{output.name} has shape {found.shape}, strides {found.stride}, {found.dtype}"
        yield from _shared(execution, output.name, tensor is own, found, expected, donated)
        other = owners.setdefault(found.block, at)
        if other != at and (donated or reference.outputs[other][0].block is not expected.block):
            yield f"{output.name} shares memory with {named[other].name}"


def _shared(
    execution: Execution, name: str, is_own: bool, found: View, expected: View, donated: set[int]
) -> Iterator[str]:
    """Memory that a result may not lie in."""
    block = found.block
    if is_own or block.kind == "fresh" or found.numel == 0:
        return
    if block.kind == "input":
        there = execution.view(execution.inputs[0]).block
        for at, tensor in enumerate(execution.inputs):
            there = execution.view(tensor).block
            same = execution.reference.inputs[at].block is expected.block
            if there is block and (at in donated or not same):
                yield f"{name} lies in the memory of {execution.reference.trace.inputs[at].name}"
                return
        return
    yield f"{name} lies in memory that the step keeps ({block.kind} {block.name})"


def _wrong_memory(trace: Trace, execution: Execution, outputs: list[torch.Tensor]) -> Iterator[str]:
    """What comes from outside holds at the end what the trace leaves in it, but for new values in donated memory."""
    reference, values = execution.reference, execution.values
    given_back = {
        reference.inputs[output.slot].block
        for output, tensor in zip((o for o in trace.outputs if o.node is not None), outputs, strict=False)
        if output.slot is not None and tensor is execution.inputs[output.slot]
    }
    overlapping = {reference.inputs[at].block for at, item in enumerate(trace.inputs) if item.shares_memory}
    for block, size in reference.sizes.items():
        own = execution.outside(block)
        name = block.name or "what the step closes over"
        if block in overlapping and own.writes and block.writes == block.initial:
            yield f"{name} is written, and shares memory with other inputs"
        if block in given_back or (own.writes == 0 and block.writes == block.initial):
            continue
        whole = [view_of(each, 0, (size,), (1,), torch.uint8) for each in (own, block)]
        one, two = map(values.memory.read, whole)
        if one is not two:
            yield f"{name} holds something else at the end: {describe(one)}, not {describe(two)}"


def _reshaped(execution: Execution) -> Iterator[str]:
    """What outlives a call is still looked at under the shape that it had."""
    for name, tensor, view in execution.held:
        if execution.view(tensor) != view:
            yield f"{name} has other strides or another shape after a call"


class _Messages:
    """The messages of a program: what they carry, and that each starts and is waited for in its turn.

    Args:
        trace: that it was written for.
        plan: likewise; None for the body of a loop, which sends nothing.
        program: it.
        reference: the trace, carried out.
        communicates: whether messages are sent, other than those that gather.
    """

    def __init__(
        self, trace: Trace, plan: Plan | None, program: Program, reference: Reference, communicates: bool
    ) -> None:
        self._trace, self._program, self._reference = trace, program, reference
        buckets = () if plan is None else plan.buckets
        self._buckets = {b.index: b for b in buckets if communicates or b.op == "all_gather"}
        schedule = () if plan is None else plan.schedule
        self._order = [
            ("start" if isinstance(item, Start) else "wait", item.bucket)
            for item in schedule
            if isinstance(item, (Start, Wait)) and item.bucket in self._buckets
        ]
        self._done: list[tuple[str, int]] = []
        self._sent: dict[int, list[tuple[View, Term]]] = {}

    def start(self, execution: Execution, index: int) -> None:
        """Note what a bucket holds; it is on the wire from here on."""
        bucket = self._next("start", index)
        for at, member in enumerate(bucket.members):
            reduction = self._trace.reductions[member]
            slot, result = self._lies(execution, bucket, at)
            term = execution.values.read(slot)
            op = bucket.op
            if index in self._program.scaled:
                # A sum of shares of 1/N is a mean.
                whole = self._reference.shares.get(term) or execution.values.unshared(term)
                op, term = ("sum", term) if whole is None else ("mean", whole)
            sent = execution.values.combined(op, bucket.root, bucket.accumulate_dtype, term)
            expected = self._reference.markers[self._trace.operations[reduction.operation].node]
            if sent is not expected:
                raise VerificationError(
                    f"bucket {index} sends {describe(sent)} for {reduction.name}, not {describe(expected)}"
                )
            self._sent.setdefault(index, []).append((result, sent))
        for block, start, size in self._regions(execution, bucket):
            execution.memory.take_off(block, start, size)

    def wait(self, execution: Execution, index: int) -> None:
        """The results are there."""
        bucket = self._next("wait", index)
        for block, start, size in self._regions(execution, bucket):
            execution.memory.land(block, start, size)
        for result, term in self._sent.pop(index):
            execution.memory.write(result, term)

    def missing(self) -> Iterator[str]:
        """What did not happen."""
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

    def _own_bytes(self, bucket: Bucket) -> int:
        numel, size = bucket.numel, self._trace.world_size
        if bucket.accumulate_dtype is not None:
            numel = -(-numel // size) * size
        return numel * bucket.dtype.itemsize

    def _behind(self, bucket: Bucket) -> int:
        """Where, in the memory of a bucket, begins what comes from other ranks, if it has a place of its own."""
        return -(-self._own_bytes(bucket) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def _regions(self, execution: Execution, bucket: Bucket) -> Iterator[tuple[Block, int, int]]:
        """The bytes that a message reads or writes."""
        device, start = execution.where["bucket", bucket.index]
        own = self._own_bytes(bucket)
        regions = [(start, own)]
        if bucket.op == "all_gather":
            regions.append((start + self._behind(bucket), own * self._trace.world_size))
        elif bucket.accumulate_dtype is not None:
            regions.append((start + self._behind(bucket), own))
        for begin, size in regions:
            if begin + size > self._program.layouts[device].size_bytes:
                raise VerificationError(f"bucket {bucket.index} lies beyond the memory of the step")
            yield execution.arena[device], begin, size

    def _lies(self, execution: Execution, bucket: Bucket, at: int) -> tuple[View, View]:
        """A member of a bucket: where what is sent lies, and where the result will."""
        if ("bucket", bucket.index) not in execution.where:
            raise VerificationError(f"bucket {bucket.index} has no memory")
        device, start = execution.where["bucket", bucket.index]
        shape, offset = self._trace.reductions[bucket.members[at]].shape, bucket.offsets[at]
        steps: tuple[Any, ...] = ()
        numel = 1
        for size in reversed(shape):
            steps = (numel, *steps)
            numel *= size
        itemsize = bucket.dtype.itemsize
        if offset + numel > bucket.numel:
            raise VerificationError(f"a member lies behind the end of bucket {bucket.index}")
        block, begin = execution.arena[device], start + offset * itemsize
        slot = _view(block, begin, tuple(shape), steps, bucket.dtype)
        if bucket.op != "all_gather":
            return slot, slot
        begin += self._behind(bucket)
        whole, apart = (self._trace.world_size, *shape), (bucket.numel, *steps)
        return slot, _view(block, begin, whole, apart, bucket.dtype)


def _view(block: Block, start: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> View:
    extent = extent_of(shape, stride)
    span = extent.span * dtype.itemsize
    return View(block, start, extent.shape, extent.stride, dtype, span, extent.numel, extent.dense)
