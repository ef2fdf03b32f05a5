"""`Trace` -> `Plan`: which reductions share a bucket, when each bucket starts, and what waits for it.

cost/ (seconds) -> plan -> buckets -> schedule -> simulate -> search/ (the best cuts) -> build; ddp, scaling
"""

from fdp.plan.build import plan_trace
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.estimate import Machine, estimate
from fdp.plan.cost.network import Network
from fdp.plan.plan import Bucket, Item, Plan, Run, Start, Wait
from fdp.plan.scaling import Scale, Scaling, scaling
from fdp.plan.scaling_picture import draw_scaling
from fdp.plan.simulate import simulate

__all__ = [
    "Bucket",
    "Costs",
    "Item",
    "Machine",
    "Network",
    "Plan",
    "Run",
    "Scale",
    "Scaling",
    "Start",
    "Wait",
    "draw_scaling",
    "estimate",
    "plan_trace",
    "scaling",
    "simulate",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
