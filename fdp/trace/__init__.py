"""step + example inputs -> `Trace`: the flat graph, what varies, and the gradients in production order.

arguments -> capture -> checks, variance -> dependencies -> record
"""

from fdp.trace.arguments import (
    Flat,
    Roles,
    Summary,
    describe_change,
    flatten,
    refuse_unhashable,
    resolve_roles,
    set_apart,
    sharing,
    summarise,
)
from fdp.trace.build import run_untraced, trace_step
from fdp.trace.capture import recording
from fdp.trace.record import Input, Operation, Output, Reduction, Trace
from fdp.trace.remembered import RememberedCalls

__all__ = [
    "Flat",
    "Input",
    "Operation",
    "Output",
    "Reduction",
    "RememberedCalls",
    "Roles",
    "Summary",
    "Trace",
    "describe_change",
    "flatten",
    "recording",
    "refuse_unhashable",
    "resolve_roles",
    "run_untraced",
    "set_apart",
    "sharing",
    "summarise",
    "trace_step",
]
