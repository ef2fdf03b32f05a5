"""Compare a program with the step in the way that its backend allows: operation by operation, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fdp.compare.compiled import can_compare, check_compiled
from fdp.compare.fits_in_memory import if_memory_allows
from fdp.compare.op_by_op import check_emitted
from fdp.compare.side_by_side import On
from fdp.runtime.emitted import Emitted
from fdp.trace import Flat, Roles


def check_program(
    program: Emitted,
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    on: On = "both",
    finite: Sequence[bool] = (),
    emitted: Emitted | None = None,
) -> list[bool]:
    """Compare a program with the step itself, on this rank alone.

    Args:
        program: what is to run.
        step: the user's function.
        flat: the arguments of a call; they are not changed.
        roles: what each argument is.
        on: which inputs.
        finite: what an earlier comparison returned, if this one is on perturbed inputs alone.
        emitted: the same plan, operator by operator, if it is there already.

    Returns:
        For each leaf of the results, whether it was finite on the inputs of a call.

    Raises:
        TraceError: the trace is wrong, or a program that runs operation by operation.
        CompileError: a program that runs in another way is wrong.
        PurityError: the step changes tensors that it closes over.
    """
    if program.backend.by_operation:
        return check_emitted(program, step, flat, roles, on, finite)
    return check_compiled(program, step, flat, roles, on, finite, emitted)


def check_again(
    program: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, finite: Sequence[bool] | None = None
) -> bool:
    """Compare a step that has been running, on the inputs of another call.

    Args:
        program: what runs.
        step: the user's function.
        flat: the arguments of the call; they are not changed.
        roles: what each argument is.
        finite: what `check_program` returned at the first call, if the comparison on perturbed inputs is still to come.

    Returns:
        Whether it could be compared.

    Raises:
        TraceError: as at the first call.
        CompileError: as at the first call.
        PurityError: as at the first call.
    """
    # A recording does nothing but replay what was recorded: it cannot be run on copies.
    if program.hides_messages or not can_compare(program):
        return False

    def compare() -> None:
        check_program(program, step, flat, roles, "call" if finite is None else "perturbed", finite or ())

    return if_memory_allows(program, "the comparison at a later call", compare)
