"""What it costs to watch other ranks.

    python benchmarks/liveness.py [--case NAME]... [--rounds N]

Two gloo ranks on this machine, one thread each, run one training loop. By turns, fifteen steps each after three that
are not timed, its calls are

- unwatched: as with FDP_LIVENESS_S=0; the monitors run, and get no reports;
- watched: as they are by default.

Printed are medians of a turn's step, and of the ratios to the unwatched turn of the same round, with the quartiles; and
what a call that waits for nothing adds, measured alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from cases import CASES
from interleaved import Ways, started, times_of_ways
from launch import Place, run_in
from rich.console import Console
from rich.table import Table
from step_time import paired_ratio

import fdp
from fdp.distributed.liveness import watch
from fdp.distributed.liveness.patience import refuse_gone

WAYS = ("unwatched", "watched")
CALLS = 20_000


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Watch no rank."""
    before = dict(watch._groups)
    for group in before:
        watch._groups[group] = None
    try:
        yield
    finally:
        watch._groups.update(before)


def on_rank(case: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Train by turns; seconds of a step in each turn, by the clock and by whether ranks are watched."""
    ways: Ways = {"unwatched": unwatched, "watched": contextlib.nullcontext}
    return times_of_ways(started(case), ways, rounds)


def of_a_call() -> float:
    """Seconds that the bookkeeping of one call takes: it begins, its messages are there, it ends."""
    fdp.psum(torch.ones(1))
    watched = watch.watched_ranks(dist.group.WORLD)
    assert watched is not None
    each = []
    for _ in range(9):
        begun = time.perf_counter()
        for call in range(CALLS):
            watched.begin("step", call)
            refuse_gone(watched)
            watch.watched_ranks(dist.group.WORLD)
            watched.messages_are_there()
            watched.end(None)
        each.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(each)


def main() -> None:
    """Measure, and print a row for each case."""
    parser = argparse.ArgumentParser(description="What it costs to watch other ranks.")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: host-bound and deep-narrow")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each way")
    arguments = parser.parse_args()
    table = Table(title="two gloo ranks, rank 0: a step in ms; ratio to the unwatched one, median [quartiles]")
    for name in ("case", "clock", *WAYS, "watched / unwatched"):
        table.add_column(name, justify="right")
    for case in arguments.case or ["host-bound", "deep-narrow"]:
        measured = run_in(Place(2, "gloo"), on_rank, case, arguments.rounds)[0]
        for clock, found in measured.items():
            low, middle, high = paired_ratio(found["watched"], found["unwatched"])
            cells = [f"{statistics.median(found[way]) * 1e3:.3f}" for way in WAYS]
            table.add_row(case, clock, *cells, f"{middle:.3f} [{low:.3f}, {high:.3f}]")
    console = Console(width=120)
    console.print(table)
    seconds = run_in(Place(2, "gloo"), of_a_call)[0]
    console.print(f"what is written down about one call: {seconds * 1e6:.2f} µs")


if __name__ == "__main__":
    main()
