"""Compare a program as a whole, such as a compiled one, with the step itself, on the same inputs and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.compare.copies import copy_of, give_back_memory
from fdp.compare.leaves import Difference
from fdp.compare.op_by_op import check_emitted, check_graph
from fdp.compare.restored import closed_over_unchanged, undisturbed
from fdp.compare.side_by_side import Case, NotRunnable, On, SideBySide, positions_of
from fdp.errors import CompileError, FdpError, build_message, first_line
from fdp.runtime.emitted import Emitted
from fdp.trace import Flat, Roles, recording
from fdp.trace.operators.effects import effects_of


def check_compiled(
    compiled: Emitted,
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    on: On = "both",
    finite: Sequence[bool] = (),
    emitted: Emitted | None = None,
) -> list[bool]:
    """Run the compiled program beside the step itself, on this rank alone.

    Where both draw the same random numbers that is all, mostly: what compiles a trace that is wrong is wrong, too.
    But fused arithmetic rounds in other places, and a step may make much of that: where a gradient is zero but for
    rounding, Adam takes a whole step to one side or the other. So where results differ, the graph runs operator by
    operator as well. It has to compute what the step does; and then it shows how much rounding can do to each element
    of the result. Random numbers that the compiler draws in its own way leave values that cannot be compared; then only
    shapes, dtypes and the run are.

    Args:
        compiled: what the compiler made.
        step: the user's function.
        flat: the arguments of a call; they are not changed.
        roles: what each argument is.
        on: which inputs.
        finite: what an earlier comparison returned, if this one is on perturbed inputs alone.
        emitted: the same plan, operator by operator, if it is there already.

    Returns:
        For each leaf of the results, whether it was finite on the inputs of a call.

    Raises:
        CompileError: names each output that differs, and by how much.
        TraceError: likewise; it is the trace that is wrong.
        PurityError: the step changes tensors that it closes over.
    """

    def by_operators() -> list[bool]:
        return check_emitted(emitted or Emitted(compiled.plan, compiled.group), step, flat, roles)

    if not can_compare(compiled):
        known = by_operators()
        _check_shapes(compiled, flat)
        return known
    try:
        return _compare(compiled, step, flat, roles, on, finite)
    except NotRunnable as error:
        by_operators()  # or it is the trace that cannot be run
        assert isinstance(error.__cause__, Exception)
        raise _not_runnable(compiled, error.__cause__) from error.__cause__


def can_compare(compiled: Emitted) -> bool:
    """Whether a program draws the random numbers of the step's operators, or none."""
    graph = compiled.plan.trace.graph.graph
    return compiled.backend.draws_alike or not any(effects_of(node).random for node in graph.nodes)


def _compare(
    compiled: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, on: On, finite: Sequence[bool]
) -> list[bool]:
    """As `check_compiled`, for a program that can be compared; an error of its own is a `NotRunnable`."""

    def explain(offenders: list[Difference], case: Case) -> None:
        excuses = check_graph(compiled, offenders, case)
        positions = positions_of(compiled, offenders)
        wrong = [
            f"{offender.text}; rounding does not explain it: {_largest(offender.found, excuses.exact[at]):.3g} "
            "from what its operators compute"
            for offender, at in zip(offenders, positions, strict=True)
            if not excuses.excused(at, offender.found)
        ]
        if wrong:
            raise _not_the_same(compiled, wrong)

    give_back_memory()
    with closed_over_unchanged(compiled), recording():
        known = SideBySide(compiled, step, flat, roles, explain, wants_cause=True).run(on, finite)
    give_back_memory()
    return known


def _check_shapes(compiled: Emitted, flat: Flat) -> None:
    """Run the program, and check the shapes and dtypes of its results."""
    give_back_memory()
    with undisturbed(compiled):
        try:
            found = compiled.dry_run_apart([copy_of(x) for x in flat.tensors])
        except FdpError:
            raise
        except Exception as error:
            raise _not_runnable(compiled, error) from error
    tensors = [output for output in compiled.plan.trace.outputs if output.node is not None]
    offenders = [
        f"{due.name}: {list(one.shape)} {one.dtype} where {list(due.shape or ())} {due.dtype} is due"
        for due, one in zip(tensors, found, strict=True)
        if (tuple(one.shape), one.dtype) != (due.shape, due.dtype)
    ]
    give_back_memory()
    if offenders:
        raise _not_the_same(compiled, offenders)


def _not_runnable(compiled: Emitted, error: Exception) -> CompileError:
    return CompileError(
        build_message(
            f"the {compiled.backend.how} step {compiled.plan.trace.name!r} does not run.",
            [f"{type(error).__name__}: {first_line(error)}"],
            remedy="compile=False runs it operator by operator.",
        )
    )


def _not_the_same(compiled: Emitted, offenders: Sequence[str]) -> CompileError:
    what = f"the {compiled.backend.how} step {compiled.plan.trace.name!r}"
    return CompileError(
        build_message(
            f"{what} does not compute what its operators compute on the same inputs.",
            offenders,
            remedy="compile=False runs it operator by operator; please report the step.",
        )
    )


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference of two tensors, infinite if they are not of one shape."""
    return float((one.double() - two.double()).abs().max()) if one.shape == two.shape else math.inf
