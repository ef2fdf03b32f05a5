"""`Trace` -> `Plan`: which reductions share a bucket, when each bucket starts, and what waits for it.

buckets -> schedule -> record
"""

from fdp.plan.build import plan_trace
from fdp.plan.costs import Costs
from fdp.plan.network import Network
from fdp.plan.record import Bucket, Item, Plan, Run, Start, Wait

__all__ = ["Bucket", "Costs", "Item", "Network", "Plan", "Run", "Start", "Wait", "plan_trace"]
