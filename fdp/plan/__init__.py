"""`Trace` -> `Plan`: which reductions share a bucket, when each bucket starts, and what waits for it.

buckets -> schedule -> record; costs and network -> ticks -> simulate -> timeline
"""

from fdp.plan.build import plan_trace
from fdp.plan.costs import Costs
from fdp.plan.estimate import Machine, estimate
from fdp.plan.network import Network
from fdp.plan.record import Bucket, Item, Plan, Run, Start, Wait
from fdp.plan.simulate import simulate
from fdp.plan.timeline import Interval, Timeline

__all__ = [
    "Bucket", "Costs", "Interval", "Item", "Machine", "Network", "Plan", "Run", "Start", "Timeline", "Wait", "estimate",
    "plan_trace", "simulate",
]  # fmt: skip
