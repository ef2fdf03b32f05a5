"""step + example inputs -> `Trace`: the flat graph, what varies, and the gradients in production order.

operators -> trace -> calls -> capture -> graph -> checks -> sharding -> tracer
"""

from fdp.trace.calls.arguments import (
    Flat,
    Roles,
    describe_inputs,
    flatten_call,
    refuse_unhashable,
    resolve_roles,
    sharing,
    split_static,
)
from fdp.trace.calls.changes import Summary, describe_change, summarise
from fdp.trace.calls.finite_flags import ReturnsFiniteFlags, WithFiniteFlags
from fdp.trace.calls.keywords import by_position, signature_of
from fdp.trace.calls.outside_values import OutsideValues
from fdp.trace.calls.recognise import RememberedCall, RememberedCalls
from fdp.trace.capture.calling import run_untraced
from fdp.trace.capture.capture import Geometry, capture_functional
from fdp.trace.capture.switches import compiling, recording, without_fused_lstm
from fdp.trace.checks.uncertain_strides import uncertain_for_draws
from fdp.trace.equality import same_program
from fdp.trace.trace import Input, Operation, Output, Reduction, Trace
from fdp.trace.tracer import Choice, gather_once, trace_step

__all__ = [
    "Choice",
    "Flat",
    "Geometry",
    "Input",
    "Operation",
    "Output",
    "OutsideValues",
    "Reduction",
    "RememberedCall",
    "RememberedCalls",
    "ReturnsFiniteFlags",
    "Roles",
    "Summary",
    "Trace",
    "WithFiniteFlags",
    "by_position",
    "capture_functional",
    "compiling",
    "describe_change",
    "describe_inputs",
    "flatten_call",
    "gather_once",
    "recording",
    "refuse_unhashable",
    "resolve_roles",
    "run_untraced",
    "same_program",
    "sharing",
    "signature_of",
    "split_static",
    "summarise",
    "trace_step",
    "uncertain_for_draws",
    "without_fused_lstm",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
