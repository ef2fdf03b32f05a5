"""step + example inputs -> `Trace`: the flat graph, what varies, and the gradients in production order.

    arguments -> capture -> checks, variance -> dependencies -> record
"""

from fdp.trace.arguments import Flat, Roles, describe_change, flatten, refuse_unhashable, resolve_roles
from fdp.trace.build import run_untraced, trace_step
from fdp.trace.capture import recording
from fdp.trace.record import Input, Operation, Output, Reduction, Trace

__all__ = [
    "Flat",
    "Input",
    "Operation",
    "Output",
    "Reduction",
    "Roles",
    "Trace",
    "describe_change",
    "flatten",
    "recording",
    "refuse_unhashable",
    "resolve_roles",
    "run_untraced",
    "trace_step",
]
