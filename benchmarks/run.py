"""fdp beside DistributedDataParallel in its best setting, and beside plain PyTorch: step time and memory.

    python benchmarks/run.py [--setting NAME]... [--case NAME]... [--rounds N] [--no-memory] [--json FILE]

Settings: "ranks" is two gloo ranks on this machine, one thread each, beside DDP; "one" is one process of one thread
without a process group, beside plain PyTorch; "gpu" is an NCCL group of one rank. Everybody runs the fused AdamW.
docs/benchmarks.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import gpu
from cases import CPU_CASES
from contenders import DDP
from figures import Figures, Setting, machine, measure
from launch import Place, Tell
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tables import comparison, everybody

RANKS = Setting("ranks", "two gloo ranks", Place(2, "gloo"), CPU_CASES, DDP, "best DDP")
ONE = Setting("one", "one process", Place(1, None), CPU_CASES, ("eager",), "eager")
SETTINGS = {setting.name: setting for setting in (RANKS, ONE, gpu.SETTING)}


def _measure_all(
    console: Console, setting: Setting, cases: list[str], rounds: int | None, with_memory: bool
) -> dict[str, Figures]:
    figures = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:

        def begin(what: str) -> Tell:
            if not console.is_terminal:  # where a bar is not drawn, a line says what goes on
                print(what, file=sys.stderr, flush=True)
            for done_with in progress.task_ids:
                progress.remove_task(done_with)
            task = progress.add_task(what, total=None)
            progress.refresh()
            shown = time.monotonic()

            def tell(done: int, total: int) -> None:
                # Drawn here, between two steps, and by no thread, which would need a processor that is being timed.
                nonlocal shown
                progress.update(task, completed=done, total=total)
                if time.monotonic() - shown > 1.0:
                    shown = time.monotonic()
                    progress.refresh()

            return tell

        for case in cases:
            figures[case] = measure(setting, case, rounds, with_memory, begin)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for setting in SETTINGS.values() for case in setting.cases]
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="only this one; may be repeated")
    parser.add_argument("--case", action="append", choices=list(dict.fromkeys(names)), help="only this one; repeatable")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: by case, at least 30)")
    parser.add_argument("--no-memory", action="store_true", help="step time only")
    parser.add_argument("--json", type=pathlib.Path, help="write every single time to this file")
    args = parser.parse_args(arguments)
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds has to be at least 1")

    # Wide enough for a row on one line, also where the terminal's width is not known.
    console = Console(width=max(Console().width, 200))
    start = time.monotonic()
    found: dict[str, dict[str, Figures]] = {}
    for name in args.setting or SETTINGS:
        setting = SETTINGS[name]
        cases = [case.name for case in setting.cases if args.case is None or case.name in args.case]
        if not cases:
            continue
        if setting is gpu.SETTING and not gpu.measurable():
            console.print("GPU: not measured (no CUDA device, or no NCCL, here).\n")
            continue
        found[name] = _measure_all(console, setting, cases, args.rounds, not args.no_memory)
        console.print(f"{setting.title}, one thread each, fused AdamW; fdp beside {setting.peer}\n")
        tables = gpu.tables(found[name]) if setting is gpu.SETTING else [comparison(setting, found[name])]
        for table in [*tables, everybody(setting, found[name])]:
            console.print(table)
    where = {
        **machine(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    console.print(", ".join(f"{k} {v}" for k, v in where.items()))
    if args.json:
        figures = {name: {case: row.as_json() for case, row in rows.items()} for name, rows in found.items()}
        args.json.write_text(json.dumps({"machine": where, "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
