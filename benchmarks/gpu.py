"""The same comparison on one CUDA device: an NCCL group of one rank, host and device time apart.

    python benchmarks/run.py --setting gpu

`python benchmarks/compiled.py --setting gpu` is the one for compiled steps. One rank sends nothing, so this shows
what each design costs on the host and on the device, and not how it communicates: DDP copies gradients into its buckets
and starts all-reduces of one rank, fdp leaves both away in a world of one.

- host: wall clock until the step has returned; the device was idle when it began. Where the device is slower, this
  is the time to queue its work, as long as the queue has room.
- device: between two events, one before the first and one after the last operation of the step. Where the host is
  slower, the device waits for it, and this is the host's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from cases import GPU_CASES
from contenders import DDP, DDP_COMPILE
from figures import Figures, Setting
from launch import Place
from rich.table import Table
from tables import markdown_table, mebibytes, milliseconds, quartiles

SETTING = Setting("gpu", "one NCCL rank on a GPU", Place(1, "nccl"), GPU_CASES, DDP, "best DDP", also=("eager",))
COMPILED = dataclasses.replace(
    SETTING,
    peers=(*DDP_COMPILE, "ddp-compile-graphs"),
    peer="best DDP + compile",
    also=(*DDP, "fdp", "fdp-compile-graphs"),
    ours="fdp-compile",
)


def measurable() -> bool:
    """Whether there is a CUDA device, and NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def tables(figures: Mapping[str, Figures], setting: Setting) -> list[Table]:
    """A table of time, a row a case and clock, and one of memory."""
    memory = [_memory(figures, setting)] if all(row.memory for row in figures.values()) else []
    return [_times(figures, setting), *memory]


def _times(figures: Mapping[str, Figures], setting: Setting) -> Table:
    out = markdown_table("case", "clock", "fdp, ms", "best DDP, ms", "time ratio (quartiles)")
    for case, row in figures.items():
        for clock in ("host", "device"):
            peer = row.fastest(setting.peers, clock)
            ours, theirs = milliseconds(row, setting.ours, clock), milliseconds(row, peer, clock)
            out.add_row(case, clock, ours, f"{theirs} ({peer})", quartiles(row.time_ratio(setting.ours, peer, clock)))
    return out


def _memory(figures: Mapping[str, Figures], setting: Setting) -> Table:
    out = markdown_table("case", "fdp, MiB above", "best DDP, MiB above", "memory ratio")
    for case, row in figures.items():
        peer = row.leanest(setting.peers)
        ours, theirs = (mebibytes(row.memory[name].tensors_above_bytes) for name in (setting.ours, peer))
        out.add_row(case, ours, f"{theirs} ({peer})", f"{row.memory_ratio(setting.ours, peer):.2f}")
    return out
