"""Peak memory of a training step above the state that has to live anyway, each contender in fresh processes.

Two figures, since neither tells all:

- tensors: the most bytes that tensors held at any time during a step, from the allocator's own record (the
  profiler's memory events, summed from before the model is built), less the bytes of parameters and optimizer
  state. It is exact and repeatable, and covers gradients, buckets and activations, whoever holds them.
- process: the peak of the resident set during the steps (VmHWM, reset through /proc/self/clear_refs before
  them; Linux only), less the resident set just before the model is built, less the same state. It also holds
  what the other does not see: gloo's buffers, the traced graph and generated code, pages of kernels used for
  the first time, and what malloc keeps. A step of a tiny model runs first, so that most library code is
  resident before.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import re

import torch
from cases import CASES, CONTENDERS, Case
from launch import on_ranks
from torch import nn

_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one contender on rank 0, in bytes.

    Attributes:
        state_bytes: parameters, buffers and optimizer state.
        tensors_above_bytes: peak of tensor memory less the state.
        process_above_bytes: peak of the resident set's growth less the state; None where there is no /proc.
    """

    state_bytes: int
    tensors_above_bytes: int
    process_above_bytes: int | None


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _warm_the_library(contender: str, case: Case) -> None:
    tiny = dataclasses.replace(
        case,
        model=lambda: nn.Linear(4, 4),
        batch=lambda: {"x": torch.randn(4, 4), "y": torch.randn(4, 4)},
        loss=lambda out, batch: (out - batch["y"]).square().mean(),
    )
    running = CONTENDERS[contender](tiny)
    for _ in range(2):
        running.step()


def _process_on_rank(case_name: str, contender: str, steps: int) -> tuple[int, int | None]:
    case = CASES[case_name]
    _warm_the_library(contender, case)
    gc.collect()
    measurable = _CLEAR_REFS.exists()
    before = _status_bytes("VmRSS") if measurable else 0
    running = CONTENDERS[contender](case)
    for _ in range(3):
        running.step()
    gc.collect()
    if not measurable:
        return running.state_bytes(), None
    _CLEAR_REFS.write_text("5")
    for _ in range(steps):
        running.step()
    return running.state_bytes(), _status_bytes("VmHWM") - before - running.state_bytes()


def _tensors_on_rank(case_name: str, contender: str, steps: int) -> int:
    # From before the model is built, or what is freed later would be counted below zero.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        running = CONTENDERS[contender](CASES[case_name])
        for _ in range(3):
            running.step()
        gc.collect()
        with torch.profiler.record_function("measured"):
            for _ in range(steps):
                running.step()
        state = running.state_bytes()
    events = profile.profiler.kineto_results.events()
    window = next(e for e in events if e.name() == "measured")
    start, end = window.start_ns(), window.start_ns() + window.duration_ns()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        if start <= event.start_ns() <= end:
            peak = max(peak, held)
    return peak - state


def measure_memory(case_name: str, contender: str, steps: int = 3, world: int = 2) -> Memory:
    """Measures one contender's memory on fresh ranks; reports rank 0's.

    Args:
        case_name: a key of `cases.CASES`.
        contender: a key of `cases.CONTENDERS`.
        steps: measured steps, after three of warming up.
        world: number of ranks.

    Returns:
        The figures in bytes.
    """
    state, process = on_ranks(world, _process_on_rank, case_name, contender, steps)[0]
    tensors = on_ranks(world, _tensors_on_rank, case_name, contender, steps)[0]
    return Memory(state, tensors, process)
