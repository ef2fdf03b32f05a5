"""The obligations of a program: it computes what its trace says, and leaves memory as the trace does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from fdp.context.garbage import without_collections
from fdp.errors import build_message
from fdp.plan.plan import Plan
from fdp.trace.trace import Trace
from fdp.verify.execution import Execution
from fdp.verify.failure import VerificationError
from fdp.verify.memory import Block, View, view_of
from fdp.verify.message_checks import Messages
from fdp.verify.program_protocol import ProgramProtocol
from fdp.verify.reference import Reference
from fdp.verify.terms import term_text


def verify_program(
    plan: Plan, program: ProgramProtocol, rank: int, communicates: bool, tick: Callable[[], None] | None = None
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
    with _plain_context(), without_collections():
        _verify(plan.trace, plan, program, Reference(plan.trace, rank), communicates, tick)


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
    program: ProgramProtocol,
    reference: Reference,
    communicates: bool,
    tick: Callable[[], None] | None,
) -> None:
    messages = Messages(trace, plan, program, reference, communicates)
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
    if execution.checked != reference.checked:
        offenders.append("values are not checked by the same operators")
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
            yield f"{output.name} is {term_text(value)}, not {term_text(term)}"
        own = None if output.slot is None else execution.inputs[output.slot]
        if (found.shape, found.stride, found.dtype) != (expected.shape, expected.stride, expected.dtype):
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
    """Memory from outside must end with the trace's content, except for new values in donated memory."""
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
            yield f"{name} holds something else at the end: {term_text(one)}, not {term_text(two)}"


def _reshaped(execution: Execution) -> Iterator[str]:
    """Tensors that outlive a call must keep their shape; constants must keep their content."""
    for name, tensor, view in execution.held:
        if view.block.kind == "constant" and view.block.writes > view.block.initial:
            yield f"{name} is written, and a later call reads it"
        if execution.view(tensor) != view:
            yield f"{name} has other strides or another shape after a call"
