"""What gives each rank a part of its own, beside torch.distributed: two hosts with a shaped link.

    python benchmarks/exchanges.py [--mib N] [--mbit N] [--rounds N]

Needs root, ip and tc. By turns each message is sent once, outside of steps; printed are the median of rank 0's times,
and the least.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from lab import lab_place
from launch import run_in
from rich.console import Console
from rich.table import Table
from step_time import message_seconds

import fdp


def messages(numel: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    own, whole, part = torch.ones(numel), torch.ones(numel), torch.empty(numel // 2)
    return {
        "fdp.psum_scatter": lambda: fdp.psum_scatter(own),
        "fdp.all_to_all": lambda: fdp.all_to_all(own, 0, 0),
        "fdp.ppermute, both ways": lambda: fdp.ppermute(own, [(0, 1), (1, 0)]),
        "fdp.all_gather of its half": lambda: fdp.all_gather(part),
        "torch all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "torch all_reduce": lambda: dist.all_reduce(whole),
        "torch reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, own),
        "torch all_to_all_single": lambda: dist.all_to_all_single(whole, own),
    }


def on_rank(mib: float, rounds: int) -> dict[str, list[float]]:
    """Send each message by turns; seconds of each."""
    return message_seconds(messages(int(mib * 2**20) // 8 * 2), rounds)


def main() -> None:
    """Measure, and print a row for each message."""
    parser = argparse.ArgumentParser(description="Messages that give each rank a part of its own.")
    parser.add_argument("--mib", type=float, default=16.0, help="MiB of float32 that each rank holds")
    parser.add_argument("--mbit", type=float, default=200.0, help="megabits a second of each link, in each direction")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    arguments = parser.parse_args()
    place = lab_place(arguments.mbit * 1e6)
    if (missing := place.why_not()) is not None:
        parser.exit(1, f"{missing}\n")
    table = Table(title=f"two hosts, {arguments.mbit:g} Mbit/s, {arguments.mib:g} MiB a rank, gloo; ms")
    for name in ("message", "median", "least"):
        table.add_column(name, justify="left" if name == "message" else "right")
    with place.opened():
        measured = run_in(place, on_rank, arguments.mib, arguments.rounds)[0]
    for name, seconds in measured.items():
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.0f}", f"{min(seconds) * 1e3:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
