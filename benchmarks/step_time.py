"""Step time of several contenders in the same processes, interleaved step by step.

Machines drift: other work, clock rates, page caches. Contenders that take turns see the same drift, so what
is compared are the ratios of neighbouring steps, and the spread that is printed is the spread of those
ratios.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from cases import CASES
from contenders import CONTENDERS, refuse_unlike
from launch import Place, Tell, run_in


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One contender's steps in the order of the rounds, in seconds.

    Attributes:
        host_s: until the step returned, on the slowest rank.
        device_s: between two events on the device, around the step; None where there is no such device.
        page_faults: pages that the system had to provide during the step, on rank 0. Memory that malloc gave back
            after one step and asks for again in the next comes as such pages, about 0.7 us each.
    """

    host_s: list[float]
    device_s: list[float] | None
    page_faults: list[int]


Quartiles = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class _Step:
    host_s: float
    device_s: float | None
    page_faults: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """Quartiles (25%, 50%, 75%) of the ratios of two contenders' times in the same round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order in which contenders take turns: each round begins elsewhere, and every other one runs backwards.

    A contender that runs twice in a row, or after a certain other one, finds caches as it or that one left them; over
    the rounds everybody gets his share of that.

    Example:
        >>> turns("abc", 4)
        [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    orders = []
    for i in range(rounds):
        first = i // 2 % len(names)
        order = [*names[first:], *names[:first]]
        orders.append(order if i % 2 == 0 else order[::-1])
    return orders


def _on_rank(tell: Tell, case_name: str, contenders: list[str], steps: int, warmup: int) -> dict[str, list[_Step]]:
    case = CASES[case_name]
    on_device = case.device != "cpu"
    running = {name: CONTENDERS[name](case) for name in contenders}
    for contender in running.values():
        for _ in range(warmup):
            contender.step()
    refuse_unlike(case, running)
    times: dict[str, list[_Step]] = {name: [] for name in contenders}
    # A collection in the middle of a step would be charged to whoever ran then. Frozen, what is there by now need not
    # be looked through each time.
    gc.collect()
    gc.freeze()
    gc.disable()
    for i, order in enumerate(turns(contenders, steps)):
        for name in order:
            if on_device:
                torch.cuda.synchronize()
            elif dist.is_initialized():
                dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_device else (None, None)
            if begin is not None:
                begin.record()
            faults = _page_faults()
            start = time.perf_counter()
            running[name].step()
            host_s = time.perf_counter() - start
            faults = _page_faults() - faults
            device_s = None
            if begin is not None and end is not None:
                end.record()
                torch.cuda.synchronize()
                device_s = begin.elapsed_time(end) / 1e3
            times[name].append(_Step(host_s, device_s, faults))
        if i % 10 == 9:
            gc.collect()
        tell(i + 1, steps)
    gc.enable()
    return times


def measure_step_times(
    place: Place, case_name: str, contenders: list[str], steps: int, warmup: int = 5, tell: Tell | None = None
) -> dict[str, StepTimes]:
    """Times the contenders in fresh processes.

    Args:
        place: where they run.
        case_name: a key of `cases.CASES`.
        contenders: keys of `contenders.CONTENDERS`.
        steps: timed steps of each contender.
        warmup: steps of each before the first timed one; tracing happens there.
        tell: told how many rounds are done.

    Returns:
        Contender name to its times.

    Raises:
        RuntimeError: the contenders do not train the same.
    """
    by_rank = run_in(place, _on_rank, case_name, contenders, steps, warmup, tell=tell)
    out = {}
    for name in contenders:
        # A step is over when it is over on every rank.
        rounds = list(zip(*(times[name] for times in by_rank), strict=True))
        host = [max(step.host_s for step in ranks) for ranks in rounds]
        device = [max(step.device_s for step in ranks if step.device_s is not None)
                  for ranks in rounds if ranks[0].device_s is not None]  # fmt: skip
        out[name] = StepTimes(host, device or None, [step.page_faults for step in by_rank[0][name]])
    return out


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
