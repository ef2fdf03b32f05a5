"""`data_parallel` -> `Step`: what a call does, and what the first call of a signature does.

buckets_on_disk -> automatic_buckets, compile_together -> first_call, cache -> step -> transform
"""

from fdp.step.step import Step
from fdp.step.transform import data_parallel

__all__ = ["Step", "data_parallel"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
