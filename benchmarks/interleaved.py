"""One training loop on this rank that runs in one way and in another, interleaved: what does a part of fdp cost?"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from cases import CASES
from contenders import CONTENDERS
from step_time import WARMUP, turns

CLOCKS = ("wall", "processor")
WAKING, BURST = 3, 15

Ways = Mapping[str, Callable[[], AbstractContextManager[Any]]]
"""By name of a way, a context in which steps run in it."""


def started(case: str) -> Any:
    """The training loop of a case, after its first steps; the garbage collector is off from then on."""
    running = CONTENDERS["fdp"](CASES[case])
    for _ in range(WARMUP):
        running.step()
    gc.collect()
    gc.freeze()
    gc.disable()
    return running


def times_of_ways(running: Any, ways: Ways, rounds: int, burst: int = BURST) -> dict[str, dict[str, list[float]]]:
    """Train by turns.

    Args:
        running: the training loop.
        ways: the ways in which it runs.
        rounds: turns of each.
        burst: steps of a turn that are timed, after `WAKING` that are not.

    Returns:
        Seconds of a step in each turn, by clock and by way: of the median step, and of the processor in a mean step.
    """
    found: dict[str, dict[str, list[float]]] = {clock: {way: [] for way in ways} for clock in CLOCKS}
    for order in turns(tuple(ways), rounds):
        for way in order:
            with ways[way]():
                for _ in range(WAKING):
                    running.step()
                dist.barrier()
                steps, used = [], time.process_time()
                for _ in range(burst):
                    begun = time.perf_counter()
                    running.step()
                    steps.append(time.perf_counter() - begun)
                found["processor"][way].append((time.process_time() - used) / burst)
            found["wall"][way].append(statistics.median(steps))
    return found
