"""What it costs that each call of a step says which it is.

    python benchmarks/order.py [--case NAME]... [--rounds N]

Two gloo ranks on this machine, one thread each, run one training loop. By turns, fifteen steps each after three that
are not timed, its calls are

- silent: as if nothing were said; the messages are as short as they were without a header;
- said: in a header behind the first message, as in a loop that calls one step, or several with like first messages;
- ahead: in a message of their own, as where the steps of a group have first messages of unequal size or kind.

Printed are medians of a turn's step, and of the ratios to the silent turn of the same round, with the quartiles: of the
time that passes (the median step of a turn), and of the processor time of all threads of rank 0 (a turn's, by its
steps), which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cases import CASES
from interleaved import Ways, started, times_of_ways
from launch import Place, run_in
from rich.console import Console
from rich.table import Table
from step_time import paired_ratio

from fdp.runtime.buffers import Buffer
from fdp.runtime.order import Order

WAYS = ("silent", "said", "ahead")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send no header, and look at none."""
    start = Buffer.start

    def start_without(self: Buffer, *args: Any) -> Any:
        bare = bare_buffers.get(id(self))
        if bare is None:
            bare = bare_buffers[id(self)] = dataclasses.replace(self, message=None, header=None)
        return start(bare, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Buffer, "start", start_without))
        stack.enter_context(mock.patch.object(Order, "begin", lambda self, tensors: None))
        stack.enter_context(mock.patch.object(Order, "before_start", lambda self, buffer: None))
        stack.enter_context(mock.patch.object(Order, "awaits_first", False))
        yield


bare_buffers: dict[int, Buffer] = {}


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Let the group know of another step, whose first message is like no other one."""
    from fdp.runtime.order import _histories

    kinds = [history.kinds for history in _histories.values()]
    for each in kinds:
        each.add(("another",))
    try:
        yield
    finally:
        for each in kinds:
            each.discard(("another",))


def on_rank(case: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Train by turns; seconds of a step in each turn, by the clock and by the way in which calls say which they are."""
    ways: Ways = {"silent": silent, "said": contextlib.nullcontext, "ahead": ahead}
    return times_of_ways(started(case), ways, rounds)


def main() -> None:
    """Measure, and print a row for each case."""
    parser = argparse.ArgumentParser(description="What it costs that each call of a step says which it is.")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: host-bound and deep-narrow")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each way")
    arguments = parser.parse_args()
    table = Table(title="two gloo ranks, rank 0: a step in ms; ratio to the silent one, median [quartiles]")
    for name in ("case", "clock", *WAYS, "said / silent", "ahead / silent"):
        table.add_column(name, justify="right")
    for case in arguments.case or ["host-bound", "deep-narrow"]:
        measured = run_in(Place(2, "gloo"), on_rank, case, arguments.rounds)[0]
        for clock, found in measured.items():
            cells = [f"{statistics.median(found[way]) * 1e3:.3f}" for way in WAYS]
            for way in ("said", "ahead"):
                low, middle, high = paired_ratio(found[way], found["silent"])
                cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]")
            table.add_row(case, clock, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
