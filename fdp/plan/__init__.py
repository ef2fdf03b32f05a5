"""`Trace` -> `Plan`: which reductions share a bucket, when each bucket starts, and what waits for it.

buckets -> schedule -> record; costs and network -> ticks -> simulate -> timeline;
timeline -> report, pictures, perfetto; scaling -> scaling_picture
"""

from fdp.plan.build import plan_trace
from fdp.plan.costs import Costs
from fdp.plan.estimate import Machine, estimate
from fdp.plan.network import Network
from fdp.plan.perfetto import save_trace
from fdp.plan.pictures import draw
from fdp.plan.record import Bucket, Item, Plan, Run, Start, Wait
from fdp.plan.report import print_timeline
from fdp.plan.scaling import Scale, Scaling, scaling
from fdp.plan.scaling_picture import draw_scaling
from fdp.plan.simulate import simulate
from fdp.plan.timeline import Interval, Timeline

__all__ = [
    "Bucket",
    "Costs",
    "Interval",
    "Item",
    "Machine",
    "Network",
    "Plan",
    "Run",
    "Scale",
    "Scaling",
    "Start",
    "Timeline",
    "Wait",
    "draw",
    "draw_scaling",
    "estimate",
    "plan_trace",
    "print_timeline",
    "save_trace",
    "scaling",
    "simulate",
]
