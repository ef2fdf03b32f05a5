"""Peak memory of a training step above persistent memory, each contender in fresh processes.

Persistent memory is counted once: parameters, buffers, the optimizer's state, and the batches. Two figures are
above it, since neither tells all:

- tensors: the most bytes that tensors held at any time during a step, from the allocator's own record (the
  profiler's memory events, summed from before the model is built; on a GPU the caching allocator's peak), less what
  lives from step to step. It is exact and repeatable, and covers gradients, buckets, activations and any workspace
  that is allocated through torch, whoever holds it and however long.
- process: the peak of the resident set during the steps (VmHWM, reset through /proc/self/clear_refs before
  them; Linux only), less the resident set just before the model is built, less persistent memory. It also holds
  what the other does not see: gloo's buffers, the traced graph and generated code, pages of kernels used for
  the first time, and memory that was free again before the steps but that malloc did not give back to the system,
  such as what building, tracing and checking took. A step of a tiny model runs first, so that most library code is
  resident before.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import re

import torch
from cases import CASES, Case
from contenders import CONTENDERS
from launch import Place, run_in
from torch import nn

_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_WARMUP = 3


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one contender on rank 0, in bytes.

    Attributes:
        live_bytes: parameters, buffers, optimizer state and batches.
        tensors_above_bytes: peak of tensor memory less that.
        process_above_bytes: peak of the resident set's growth less that; None where the system does not tell.
    """

    live_bytes: int
    tensors_above_bytes: int
    process_above_bytes: int | None


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _reset_high_water_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


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
    # Or what was compiled for its shapes would make the compiler take those of the case for variable.
    torch.compiler.reset()


def _process(contender: str, case: Case, steps: int) -> int | None:
    if not _reset_high_water_mark():
        return None
    _warm_the_library(contender, case)
    gc.collect()
    before = _status_bytes("VmRSS")
    running = CONTENDERS[contender](case)
    for _ in range(_WARMUP):
        running.step()
    gc.collect()
    _reset_high_water_mark()
    for _ in range(steps):
        running.step()
    return _status_bytes("VmHWM") - before - running.live_bytes()


def _tensors(contender: str, case: Case, steps: int) -> tuple[int, int]:
    """Persistent memory, and the peak above it. What was allocated before the call does not count either way."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        running = CONTENDERS[contender](case)
        for _ in range(_WARMUP):
            running.step()
        gc.collect()
        with torch.profiler.record_function("measured"):
            for _ in range(steps):
                running.step()
        live = running.live_bytes()
    events = profile.profiler.kineto_results.events()
    window = next(e for e in events if e.name() == "measured")
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if event.start_ns() > window.end_ns():
            break
        held += event.nbytes()
        # Until the window begins there is no peak, only what is held as it does.
        peak = held if event.start_ns() < window.start_ns() else max(peak, held)
    return live, peak - live


def _cuda_tensors(contender: str, case: Case, steps: int) -> tuple[int, int]:
    before = torch.cuda.memory_allocated()
    running = CONTENDERS[contender](case)
    for _ in range(_WARMUP):
        running.step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        running.step()
    torch.cuda.synchronize()
    live = running.live_bytes()
    return live, torch.cuda.max_memory_allocated() - before - live


def _on_rank(case_name: str, contender: str, steps: int) -> Memory:
    case = CASES[case_name]
    if case.device != "cpu":
        live, above = _cuda_tensors(contender, case, steps)
        return Memory(live, above, None)
    # First, since it needs a process that has done nothing else; the profiler sees new memory only.
    process = _process(contender, case, steps)
    gc.collect()
    torch.compiler.reset()
    live, above = _tensors(contender, case, steps)
    return Memory(live, above, process)


def measure_memory(place: Place, case_name: str, contender: str, steps: int = 3) -> Memory:
    """Measures one contender's memory in fresh processes; reports rank 0's.

    Args:
        place: where it runs.
        case_name: a key of `cases.CASES`.
        contender: a key of `contenders.CONTENDERS`.
        steps: measured steps, after three of warming up.

    Returns:
        The figures in bytes.
    """
    memory: Memory = run_in(place.apart(contender), _on_rank, case_name, contender, steps)[0]
    return memory
