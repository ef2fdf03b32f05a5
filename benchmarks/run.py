"""Step time and memory of fdp beside DistributedDataParallel: two gloo ranks, one thread each.

    python benchmarks/run.py [--case NAME]... [--steps N] [--json FILE] [--no-memory]

Both sides run the fused AdamW. The first baseline is DDP at its default settings (a first bucket of 1 MiB,
then 25 MiB, gradients outside of the buckets); ratios are to it. "ddp-views" is DDP with
gradient_as_bucket_view=True.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
from typing import Any

import torch
from cases import CASES, CONTENDERS
from memory import Memory, measure_memory
from rich.console import Console
from rich.table import Table
from step_time import StepTime, measure_step_time

WORLD = 2


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if (info.exists())
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Where and when the figures were taken."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ranks": WORLD,
        "threads_per_rank": 1,
        "backend": "gloo, loopback",
    }


def _mib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.1f}"


def table(times: dict[str, dict[str, StepTime]], memory: dict[str, dict[str, Memory]]) -> Table:
    """The figures as one table, a row a case and contender."""
    out = Table(title=f"{WORLD} ranks, gloo on loopback, one thread each, fused AdamW")
    for column in ("case", "contender"):
        out.add_column(column)
    for column in (
        "step, ms (median)",
        "of ddp's time (quartiles)",
        "state, MiB",
        "tensors above it, MiB",
        "process above it, MiB",
    ):
        out.add_column(column, justify="right")
    for case, rows in times.items():
        for name, row in rows.items():
            low, middle, high = row.ratio
            used = memory.get(case, {}).get(name)
            cells = ("-",) * 3 if used is None else (
                _mib(used.state_bytes), _mib(used.tensors_above_bytes), _mib(used.process_above_bytes)
            )  # fmt: skip
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            out.add_row(case, name, f"{row.median_s * 1e3:.2f}", ratio, *cells)
        out.add_section()
    return out


def main() -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one; may be repeated")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="only these, beside ddp")
    parser.add_argument("--steps", type=int, help="timed steps of each contender (default: by case)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--no-memory", action="store_true", help="step time only")
    args = parser.parse_args()

    # Wide enough for the table on one line a row, also where the terminal's width is not known.
    console = Console(width=max(Console().width, 130))
    names = list(dict.fromkeys(["ddp", *(args.contender or CONTENDERS)]))
    times: dict[str, dict[str, StepTime]] = {}
    memory: dict[str, dict[str, Memory]] = {}
    for case in args.case or CASES:
        console.print(f"{case}: {CASES[case].what}")
        times[case] = measure_step_time(case, names, args.steps or CASES[case].steps, world=WORLD)
        if not args.no_memory:
            memory[case] = {name: measure_memory(case, name, world=WORLD) for name in names}
    where = machine()
    console.print(table(times, memory))
    console.print(", ".join(f"{k} {v}" for k, v in where.items()))
    if args.json:
        figures = {
            case: {
                name: {
                    "step": dataclasses.asdict(row),
                    "memory": dataclasses.asdict(memory[case][name]) if case in memory else None,
                }
                for name, row in rows.items()
            }
            for case, rows in times.items()
        }
        args.json.write_text(json.dumps({"machine": where, "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
