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
    sharing,
    summarise,
    take_apart,
)
from fdp.trace.build import run_untraced, trace_step
from fdp.trace.capture import recording
from fdp.trace.lastcall import LastCall
from fdp.trace.record import Input, Operation, Output, Reduction, Trace

__all__ = [
    "Flat",
    "Input",
    "LastCall",
    "Operation",
    "Output",
    "Reduction",
    "Roles",
    "Summary",
    "Trace",
    "describe_change",
    "flatten",
    "recording",
    "refuse_unhashable",
    "resolve_roles",
    "run_untraced",
    "sharing",
    "summarise",
    "take_apart",
    "trace_step",
]
