"""What it costs to compare the state between ranks while training goes on.

    python benchmarks/replication.py [--case NAME]... [--rounds N]

Two gloo ranks on this machine, one thread each, run one training loop. By turns, some steps each after a few that are
not timed, the state is compared (on), or it is not (off: as with `check_replication=False`, and the messages say only
which call they belong to).

Printed are medians of a turn's step, and of the ratios to the "off" turn of the same round, with the quartiles: of the
time that passes (the median step of a turn), and of the processor time of all threads of rank 0 (a turn's, by its
steps), which other work on the machine disturbs less.

Other work disturbs both by more than they differ. So what is added to a call is also timed by itself, in the same loop:
to look at the part of the state that is due, to write the number, and to read it. It is the median of the calls, and
its mean without the slowest tenth; for all rounds, since not all parts take equally long.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cases import CASES
from interleaved import BURST, CLOCKS, Ways, started, times_of_ways
from launch import Place, run_in
from rich.console import Console
from rich.table import Table
from step_time import paired_ratio

from fdp.distributed.header import Header, is_unanimous
from fdp.runtime import order
from fdp.runtime.in_passing import InPassing
from fdp.runtime.rounds import ROUNDS

WAYS = ("off", "on")


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Compare no state."""
    with mock.patch.object(InPassing, "look", lambda self, tensors, call: None):
        yield


@contextlib.contextmanager
def timed(found: dict[str, list[float]]) -> Iterator[None]:
    """Note how long it takes to look, to write the number and to read it, in us."""

    def around(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args)
            found.setdefault(what, []).append((time.perf_counter() - begun) * 1e6)
            return result

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(InPassing, "look", around("look", InPassing.look)))
        stack.enter_context(mock.patch.object(Header, "write", around("write", Header.write)))
        stack.enter_context(mock.patch.object(order, "is_unanimous", around("read", is_unanimous)))
        yield


def on_rank(case: str, rounds: int) -> dict[str, Any]:
    """Train by turns; seconds of a step in each turn, by the clock, and microseconds of what is added."""
    ways: Ways = {"off": off, "on": contextlib.nullcontext}
    running = started(case)
    found: dict[str, Any] = times_of_ways(running, ways, rounds, BURST if CASES[case].burst > 1 else 3)
    parts: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for way in WAYS:
        with timed(parts[way]), ways[way]():
            for _ in range(2 * ROUNDS):
                running.step()
    found["parts"] = parts
    return found


def without_slowest(values: list[float]) -> float:
    """The mean of all but the slowest tenth, in which something else ran."""
    return statistics.mean(sorted(values)[: -max(1, len(values) // 10)])


def main() -> None:
    """Measure, and print a row for each case."""
    parser = argparse.ArgumentParser(description="What it costs to compare state while training goes on.")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: host-bound and mlp-20m")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each way")
    arguments = parser.parse_args()
    table = Table(title="two gloo ranks, rank 0: a step in ms; ratio of on to off, median [quartiles]")
    for name in ("case", "clock", *WAYS, "on / off"):
        table.add_column(name, justify="right")
    added = Table(title="what is added to a call, in us: median, mean without the slowest tenth")
    for name in ("case", "look", "write and read", "as without state", "added", "of the step"):
        added.add_column(name, justify="right")
    for case in arguments.case or ["host-bound", "mlp-20m"]:
        measured = run_in(Place(2, "gloo"), on_rank, case, arguments.rounds)[0]
        for clock in CLOCKS:
            found = measured[clock]
            low, middle, high = paired_ratio(found["on"], found["off"])
            cells = [f"{statistics.median(found[way]) * 1e3:.3f}" for way in WAYS]
            table.add_row(case, clock, *cells, f"{middle:.3f} [{low:.3f}, {high:.3f}]")
        on, without = measured["parts"]["on"], measured["parts"]["off"]
        both = [[w + r for w, r in zip(way["write"], way["read"], strict=True)] for way in (on, without)]
        columns = [on["look"], *both]
        cells = [f"{statistics.median(each):.1f}, {without_slowest(each):.1f}" for each in columns]
        plus = without_slowest(on["look"]) + without_slowest(both[0]) - without_slowest(both[1])
        step_us = statistics.median(measured["wall"]["off"]) * 1e6
        added.add_row(case, *cells, f"{plus:.1f}", f"{plus / step_us:.2%}")
    console = Console(width=120)
    console.print(table)
    console.print(added)


if __name__ == "__main__":
    main()
