"""Step time of several contenders in the same processes, interleaved step by step.

Machines drift: other work, clock rates, page caches. Contenders that take turns see the same drift, so what
is compared are the ratios of neighbouring steps, and the spread that is printed is the spread of those
ratios.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time

import torch.distributed as dist
from cases import CASES, CONTENDERS
from launch import on_ranks

BASELINE = "ddp"


@dataclasses.dataclass(frozen=True)
class StepTime:
    """One contender's step times.

    Attributes:
        median_s: median over steps of the slowest rank's time.
        ratio: quartiles (25%, 50%, 75%) of this contender's time divided by the baseline's in the same round.
        steps: number of timed steps.
    """

    median_s: float
    ratio: tuple[float, float, float]
    steps: int


def _times_on_rank(case_name: str, contenders: list[str], steps: int, warmup: int) -> dict[str, list[float]]:
    case = CASES[case_name]
    running = {name: CONTENDERS[name](case) for name in contenders}
    for contender in running.values():
        for _ in range(warmup):
            contender.step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    # A collection in the middle of a step would be charged to whoever ran then.
    gc.collect()
    gc.disable()
    for i in range(steps):
        order = contenders if i % 2 == 0 else contenders[::-1]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            running[name].step()
            times[name].append(time.perf_counter() - start)
        if i % 10 == 9:
            gc.collect()
    gc.enable()
    return times


def measure_step_time(
    case_name: str, contenders: list[str], steps: int, warmup: int = 5, world: int = 2
) -> dict[str, StepTime]:
    """Times the contenders on fresh ranks.

    Args:
        case_name: a key of `cases.CASES`.
        contenders: keys of `cases.CONTENDERS`, the baseline among them.
        steps: timed steps of each contender.
        warmup: steps of each before the first timed one; tracing happens there.
        world: number of ranks.

    Returns:
        Contender name to its times.
    """
    by_rank = on_ranks(world, _times_on_rank, case_name, contenders, steps, warmup)
    # A step is over when it is over on every rank.
    slowest = {name: [max(row) for row in zip(*(times[name] for times in by_rank), strict=True)] for name in contenders}
    out = {}
    for name in contenders:
        ratios = [a / b for a, b in zip(slowest[name], slowest[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        out[name] = StepTime(statistics.median(slowest[name]), (low, middle, high), steps)
    return out
