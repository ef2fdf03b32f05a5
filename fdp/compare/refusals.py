"""The errors of comparisons between a step and its trace or program."""

from __future__ import annotations

from collections.abc import Sequence

from fdp.errors import TraceError, build_message, first_line
from fdp.pytree import Spec
from fdp.trace import Trace


def wrong_trace(name: str, offenders: Sequence[str]) -> TraceError:
    """The refusal for a trace that computes something else; `offenders` are the results, in words."""
    return TraceError(
        build_message(
            f"the trace of step {name!r} does not compute what the step computes on the same inputs.",
            offenders,
            remedy="look for values that are frozen when the step is traced: Python or NumPy random numbers, "
            "torch.manual_seed inside the step, counters, flags and iterators that the step itself moves on, tensors "
            "made from Python numbers that change, operators that read memory behind the dispatcher's back. "
            "check_trace=False accepts the trace as it is.",
        )
    )


def wrong_partition(trace: Trace, offenders: Sequence[str]) -> TraceError:
    """The refusal for a step that computes something else on parts than on whole values."""
    container = next(item.container for item in trace.inputs if item.part is not None)
    return TraceError(
        build_message(
            f"step {trace.name!r} does not compute on parts of {container.adjective} state what it computes on whole "
            "state.",
            offenders,
            remedy=f"this is a mistake of fdp's: please report the step. {container.undone_by}(state) keeps it whole; "
            "check_trace=False runs it as it is.",
        )
    )


def wrong_program(name: str, offenders: Sequence[str]) -> TraceError:
    """The refusal for a program that computes something else than its trace; `offenders` are operators."""
    return TraceError(
        build_message(
            f"the emitted program of step {name!r} does not compute what its operators compute on the same inputs.",
            offenders,
            remedy="this is a mistake of fdp's: please report the step. check_trace=False runs it as it is.",
        )
    )


def unrunnable(name: str, error: Exception) -> TraceError:
    """The refusal for a program that raises an error where the step does not."""
    return TraceError(
        build_message(
            f"the emitted program of step {name!r} does not run.",
            [f"{type(error).__name__}: {first_line(error)}"],
            remedy="run the step itself on these arguments; if it runs, an operator in it cannot be traced: replace it "
            "by others.",
        )
    )


def changes_inputs(name: str, changed: Sequence[str]) -> TraceError:
    """The refusal for a step that changes arguments that are not donated."""
    return TraceError(
        build_message(
            f"step {name!r} changes inputs that were not donated, through an operator that does not say so.",
            changed,
            remedy="give the operator a clone, or donate the argument.",
        )
    )


def wrong_structure(name: str, traced: Spec, by_itself: Spec) -> TraceError:
    """The refusal for results of another structure."""
    return TraceError(
        build_message(
            f"step {name!r} returned another structure when it ran by itself than when it was traced.",
            [f"traced: {traced}", f"by itself: {by_itself}"],
            remedy="make what the step returns a function of its arguments alone.",
        )
    )
