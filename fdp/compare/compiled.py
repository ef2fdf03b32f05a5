"""Compare a newly compiled program with the step itself, on the same inputs and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.compare.copies import copy_of, give_back_memory
from fdp.compare.fits_in_memory import if_memory_allows
from fdp.compare.leaves import Difference
from fdp.compare.op_by_op import check_emitted, check_graph
from fdp.compare.restored import closed_over_unchanged, undisturbed
from fdp.compare.rounding import Excuses
from fdp.compare.side_by_side import Case, NotRunnable, On, SideBySide, positions_of
from fdp.errors import CompileError, FdpError, build_message, first_line
from fdp.runtime.emitted import Emitted
from fdp.trace import Flat, Roles, recording
from fdp.trace.operators.effects import effects_of


def check_compiled(compiled: Emitted, emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles) -> None:
    """Run the compiled program beside the step itself, on this rank alone.

    Where both draw the same random numbers that is all, mostly: what compiles a trace that is wrong is wrong, too.
    But fused arithmetic rounds in other places, and a step may make much of that: where a gradient is zero but for
    rounding, Adam takes a whole step to one side or the other. So where results differ, the graph runs operator by
    operator as well. It has to compute what the step does; and then it shows how much rounding can do to each element
    of the result. Random numbers that the compiler draws in its own way leave values that cannot be compared; then only
    shapes, dtypes and the run are.

    Args:
        compiled: what the compiler made.
        emitted: the same plan, operator by operator.
        step: the user's function.
        flat: the arguments of the first call; they are not changed.
        roles: what each argument is.

    Raises:
        CompileError: names each output that differs, and by how much.
        TraceError: likewise; it is the trace that is wrong.
        PurityError: the step changes tensors that it closes over.
    """
    if not can_compare(compiled):
        check_emitted(emitted, step, flat, roles)
        _check_shapes(compiled, emitted, flat)
        return
    try:
        compare_compiled(compiled, step, flat, roles, "both")
    except NotRunnable as error:
        check_emitted(emitted, step, flat, roles)  # or it is the trace that cannot be run
        assert isinstance(error.__cause__, Exception)
        raise _not_runnable(emitted.plan.trace.name, error.__cause__) from error.__cause__


def check_again(
    program: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, finite: Sequence[bool] | None = None
) -> bool:
    """Compare a step that has been running, on the inputs of another call.

    Args:
        program: what runs.
        step: the user's function.
        flat: the arguments of the call; they are not changed.
        roles: what each argument is.
        finite: what `check_emitted` returned at the first call, if the comparison on perturbed inputs is still to come.

    Returns:
        Whether it could be compared.

    Raises:
        TraceError: as at the first call.
        CompileError: as at the first call.
        PurityError: as at the first call.
    """
    recording = program.program.recording
    # A replay does nothing but what was recorded: it cannot be run on copies.
    if (recording is not None and recording.armed) or (program.options is not None and not can_compare(program)):
        return False

    def compare() -> None:
        if program.options is None:
            check_emitted(program, step, flat, roles, "call" if finite is None else "perturbed", finite or ())
            return
        try:
            compare_compiled(program, step, flat, roles, "call")
        except NotRunnable as error:
            assert isinstance(error.__cause__, Exception)
            raise _not_runnable(program.plan.trace.name, error.__cause__) from error.__cause__

    return if_memory_allows(program, "the comparison at a later call", compare)


def can_compare(compiled: Emitted) -> bool:
    """Whether a compiled step draws the random numbers of its operators, or none."""
    assert compiled.options is not None
    graph = compiled.plan.trace.graph.graph
    return compiled.options.draws_alike or not any(effects_of(node).random for node in graph.nodes)


def compare_compiled(compiled: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, on: On) -> None:
    """As `check_compiled`, for a compiled step that can be compared; an error of its own is a `NotRunnable`."""

    def explain(offenders: list[Difference], case: Case) -> None:
        check_graph(compiled, offenders, case)
        positions = positions_of(compiled, offenders)
        excuses = Excuses(compiled, case.inputs, case.others, positions)
        wrong = [
            f"{offender.text}; rounding does not explain it: {_largest(offender.found, excuses.exact[at]):.3g} "
            "from what its operators compute"
            for offender, at in zip(offenders, positions, strict=True)
            if not excuses.excused(at, offender.found)
        ]
        if wrong:
            raise _not_the_same(compiled.plan.trace.name, wrong)

    give_back_memory()
    with closed_over_unchanged(compiled), recording():
        SideBySide(compiled, step, flat, roles, explain, wants_cause=True).run(on)
    give_back_memory()


def _check_shapes(compiled: Emitted, emitted: Emitted, flat: Flat) -> None:
    """Run the compiled program, and check the shapes and dtypes of its results."""
    give_back_memory()
    with undisturbed(emitted):
        try:
            found = compiled.dry_run_apart([copy_of(x) for x in flat.tensors])
        except FdpError:
            raise
        except Exception as error:
            raise _not_runnable(emitted.plan.trace.name, error) from error
    tensors = [output for output in emitted.plan.trace.outputs if output.node is not None]
    offenders = [
        f"{due.name}: {list(one.shape)} {one.dtype} where {list(due.shape or ())} {due.dtype} is due"
        for due, one in zip(tensors, found, strict=True)
        if (tuple(one.shape), one.dtype) != (due.shape, due.dtype)
    ]
    give_back_memory()
    if offenders:
        raise _not_the_same(emitted.plan.trace.name, offenders)


def _not_runnable(name: str, error: Exception) -> CompileError:
    return CompileError(
        build_message(
            f"the compiled step {name!r} does not run.",
            [f"{type(error).__name__}: {first_line(error)}"],
            remedy="compile=False runs it operator by operator.",
        )
    )


def _not_the_same(name: str, offenders: Sequence[str]) -> CompileError:
    return CompileError(
        build_message(
            f"the compiled step {name!r} does not compute what its operators compute on the same inputs.",
            offenders,
            remedy="compile=False runs it operator by operator; please report the step.",
        )
    )


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference of two tensors, infinite if they are not of one shape."""
    return float((one.double() - two.double()).abs().max()) if one.shape == two.shape else math.inf
