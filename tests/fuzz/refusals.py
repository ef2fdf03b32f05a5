"""Refusals that fdp documents: what a program does, and the error that it may be refused with."""

from __future__ import annotations

from fuzz.execute import Report
from fuzz.program import Program

_VALUE_READS = "reads the value of a tensor"


def reason(program: Program, report: Report) -> str | None:
    """Why a program may be refused as it was; None if it should have run.

    Args:
        program: the program.
        report: what a rank said, of status "refused".
    """
    error, text, traits = report.kind, report.text, program.traits
    if error == "ReplicationError" and ("undeclared" in traits or report.unequal):
        return "returns what varies, undeclared (docs/reference/errors.md)"
    if error == "PurityError":
        written = set(report.written) - ({"state"} if program.options.donate else set())
        if written:
            return "writes an input that is not donated (docs/reference/errors.md)"
        if "shares memory with another leaf or with itself" in text:
            return "writes donated state of which leaves share memory (docs/reference/errors.md)"
        if "turns an input" in traits:
            return "changes the shape of a view of an input in place"
        if "gives tensors another shape, or other memory, in place" in text and ".out at" in text:
            return "gives an input another shape by `out=` (docs/reference/memory-changes.md)"
        if "data" in traits or "closed" in traits:
            return "writes an input that is not donated (docs/reference/errors.md)"
    if error == "TraceError" and "gives tensors another shape in place" in text and ".out at" in text:
        return "gives a tensor that has views another shape by `out=` (docs/reference/memory-changes.md)"
    if error == "TraceError" and "shares memory with a view, and is differentiated" in text:
        return "changes the shape of a differentiated tensor beside a view (docs/reference/memory-changes.md)"
    if error == "TraceError" and "looks at its arguments by places in memory in a microbatch of fdp.accumulate" in text:
        return "a view by places in memory of an argument that fdp.accumulate cuts (docs/how-to/memory.md)"
    if error == "TraceError" and "between or behind the elements of an argument" in text:
        return "looks at memory that is no argument's (docs/reference/limits.md)"
    if error == "TraceError" and "step must be nonzero" in text and "torch.arange(0, 4.8, 0.3" in program.text:
        return "whole numbers by steps of less than one (all are the first), whose size torch's tracer cannot say"
    if error == "CompileError" and "internal overlap" in text and ".unfold(" in program.text:
        return "compiled: writes through a view that unfolds (docs/how-to/compile.md)"
    inductors = error == "CompileError" and "inductor failed on an operator" in text
    if inductors and "IndexError: tuple index out of range" in text and ".scatter" in program.text:
        return "compiled: a scatter into a tensor without dimensions, which inductor cannot compile"
    if error in ("TraceError", "PurityError") and "data" in traits and "does not compute what the step" not in text:
        return "replaces the memory of a tensor"
    return None
