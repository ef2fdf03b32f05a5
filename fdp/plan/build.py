"""From a `Trace` to a `Plan`: pure analysis, without a process group and without a device."""

from __future__ import annotations

from typing import Any

from fdp.plan.buckets import make_buckets, partition, resolve_caps
from fdp.plan.record import Plan
from fdp.plan.schedule import order
from fdp.stages import enters
from fdp.trace import Trace


@enters("plan")
def plan_trace(trace: Trace, bucket_cap_mb: Any = "auto") -> Plan:
    """Decide which reductions travel together, and when everything happens.

    Args:
        trace: of a step.
        bucket_cap_mb: a number of MiB, a list of them (first bucket, next, ...), or "auto".

    Returns:
        The plan: a function of the trace and the caps alone, so that equal ranks make equal plans.

    Raises:
        ArgumentError: `bucket_cap_mb` has no meaning.
    """
    caps = resolve_caps(bucket_cap_mb)
    buckets = make_buckets(trace.reductions, partition(trace.reductions, trace.operations, caps))
    return Plan(trace, buckets, order(trace.operations, trace.reductions, buckets), caps)
