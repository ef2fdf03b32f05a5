"""Proofs when a program gets its memory: of its tensors, and of the code that sends its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fdp.emit.codegen.program import Program
from fdp.errors import TraceError
from fdp.plan import Plan
from fdp.runtime.buffers import Buffer, make_buffers
from fdp.runtime.in_flight import InFlight
from fdp.verify import VerificationError, verify_made, verify_sent


def prove_made(
    plan: Plan, program: Program, blocks: Mapping[torch.device, torch.Tensor], buffers: Mapping[int, Buffer]
) -> None:
    """Prove that the tensors of a program are where the proof of the program assumes them.

    Args:
        plan: the plan.
        program: its program, which finds them.
        blocks: the memory that they were made in, as bytes.
        buffers: its buckets, by index.

    Raises:
        TraceError: they do not.
    """
    try:
        verify_made(plan, program, blocks, buffers)
    except VerificationError as error:
        raise TraceError(str(error)) from error


def prove_sent(plan: Plan, program: Program, rank: int) -> None:
    """Prove that the messages of a program carry what the proof of the program assumes.

    Args:
        plan: the plan.
        program: its program.
        rank: this process's rank.

    Raises:
        TraceError: it does not.
    """
    try:
        verify_sent(plan, program, rank, sending(plan, program))
    except VerificationError as error:
        raise TraceError(str(error)) from error


def sending(plan: Plan, program: Program) -> Callable[..., InFlight]:
    """What makes what sends the messages of a call, given the memory that they lie in, the ranks, and the order."""
    return lambda blocks, ranks, order: InFlight(make_buffers(plan, program, blocks), ranks, order)
