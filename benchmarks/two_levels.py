"""A mean over hosts of several ranks, in two levels and in one: hosts with a shaped link.

    python benchmarks/two_levels.py [--mib N ...] [--mbit N] [--hosts N] [--local N] [--rounds N]

Needs root, ip and tc. By turns each message is sent once, outside of steps; printed are the median of rank 0's times,
and its ratio to the flat all-reduce of the backend. The bound is what a host has to send over its link.
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
from torch.distributed.device_mesh import init_device_mesh

from fdp.distributed.group import resolve_group
from fdp.distributed.messages import rows_arriving
from fdp.runtime.two_levels import TwoLevelReduction


def messages(numel: int, hosts: int, local: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    whole = torch.ones(numel)
    group = resolve_group(init_device_mesh("cpu", (hosts, local), mesh_dim_names=("hosts", "local")))
    received = torch.empty((1 + rows_arriving(local)) * (numel // local))
    buckets = list(zip(whole.chunk(4), received.chunk(4), strict=True))

    def one_after_the_other() -> None:
        """As a step sends several buckets: each sends its second message when the next one starts."""
        under_way: list[TwoLevelReduction] = []
        for own, beside in buckets:
            under_way.append(TwoLevelReduction(own, beside, "mean", group))
            for before in under_way[:-1]:
                before.turn()
        under_way[-1].turn()
        for each in under_way:
            each.finish()

    return {
        "in one level": lambda: dist.all_reduce(whole, dist.ReduceOp.AVG),
        "in two levels": lambda: TwoLevelReduction(whole, received, "mean", group).finish(),
        "in two levels, four buckets": one_after_the_other,
    }


def on_rank(mib: float, hosts: int, local: int, rounds: int) -> dict[str, list[float]]:
    """Send each message by turns; seconds of each."""
    return message_seconds(messages(int(mib * 2**18) // (4 * local) * 4 * local, hosts, local), rounds)


def main() -> None:
    """Measure, and print a row for each size and message."""
    parser = argparse.ArgumentParser(description="A mean over hosts of several ranks.")
    parser.add_argument("--mib", type=float, nargs="+", default=[1 / 16, 1 / 4, 1, 4, 16], help="MiB of float32")
    parser.add_argument("--mbit", type=float, default=200.0, help="megabits a second of each link, in each direction")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--local", type=int, default=2, help="ranks of a host")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    given = parser.parse_args()
    place = lab_place(given.mbit * 1e6, given.hosts, given.local)
    if (missing := place.why_not()) is not None:
        parser.exit(1, f"{missing}\n")
    table = Table(title=f"{given.hosts} hosts of {given.local} ranks, {given.mbit:g} Mbit/s, gloo; ms")
    for name in ("MiB", "message", "median", "least", "bound", "ratio"):
        table.add_column(name, justify="left" if name == "message" else "right")
    with place.opened():
        for mib in given.mib:
            measured = run_in(place, on_rank, mib, given.hosts, given.local, given.rounds)[0]
            flat = statistics.median(measured["in one level"])
            # Each byte leaves a host once, if there are two; on more hosts they go around a ring.
            bound = 2 * (given.hosts - 1) / given.hosts * mib * 2**20 * 8 / (given.mbit * 1e6)
            for name, seconds in measured.items():
                median = statistics.median(seconds)
                row = (median * 1e3, min(seconds) * 1e3, bound * 1e3)
                table.add_row(f"{mib:g}", name, *(f"{ms:.1f}" for ms in row), f"{median / flat:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
