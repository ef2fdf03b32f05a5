"""The program of a plan, proved before it runs: the fast one, or a plain one if the fast one is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from fdp.emit.codegen.program import Program, write_program
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.savings import NONE
from fdp.errors import TraceError, build_message
from fdp.verify import VerificationError, verify_program


def verified_program(
    memory: MemoryPlan, rank: int, communicates: bool, tick: Callable[[], None] | None = None
) -> Program:
    """Write the program of a plan, and prove that it computes what the trace says.

    If it does not, there is one warning, and the program is written as plainly as can be.

    Args:
        memory: what was decided of the plan.
        rank: this process's rank.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        tick: as for `write_program`.

    Returns:
        The program, proved.

    Raises:
        TraceError: the plain program is wrong as well.
    """
    plan = memory.plan
    program = write_program(memory, rank, tick)
    try:
        verify_program(plan, program, rank, communicates, tick)
    except VerificationError as error:
        found = error
    else:
        return program
    plain = write_program(plan_memory(plan, communicates, NONE), rank, tick)
    try:
        verify_program(plan, plain, rank, communicates, tick)
    except VerificationError as error:
        raise TraceError(
            build_message(
                f"no program for step {plan.trace.name!r} could be proved right, so none runs.",
                str(error).splitlines()[1:-1],
                remedy="report this to the authors of fdp, with the step; the step itself, and "
                "torch.nn.parallel.DistributedDataParallel, do without fdp's programs.",
            )
        ) from error
    warnings.warn(
        f"fdp: a faster program for step {plan.trace.name!r} was found to be wrong before it ran. A plainer one, which "
        "is right, runs in its place; it is slower and takes more memory. Please report this to the authors of fdp: "
        + "; ".join(line.strip() for line in str(found).splitlines()[:-1]),
        stacklevel=2,
    )
    return plain
