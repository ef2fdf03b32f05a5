"""`Trace` -> `Plan`: which reductions share a bucket, when each bucket starts, and what waits for it.

buckets -> schedule -> record
"""

from fdp.plan import perfetto, pictures, report  # methods of `Timeline` enter there
from fdp.plan.build import plan_trace
from fdp.plan.record import Bucket, Item, Plan, Run, Start, Wait

__all__ = ["Bucket", "Item", "Plan", "Run", "Start", "Wait", "perfetto", "pictures", "plan_trace", "report"]
