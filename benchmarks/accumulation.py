"""fdp.accumulate beside DDP with no_sync(): a step of four microbatches, its time and its memory.

    python benchmarks/accumulation.py [--case NAME]... [--rounds N] [--no-memory] [--json FILE]

Two gloo ranks on this machine, one thread each. Everybody runs the fused AdamW, and averages gradients once a step.
Also measured: fdp with the whole batch at once, which takes the memory of all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from cases import ACCUMULATED_CASES
from command import Begin, carry_out, options
from figures import Figures, Setting, measure
from launch import Place
from rich.table import Table
from tables import comparison, everybody

SETTING = Setting(
    "ranks",
    "two gloo ranks",
    Place(2, "gloo"),
    ACCUMULATED_CASES,
    ("ddp-accumulates", "ddp-views-accumulates"),
    "best DDP with no_sync()",
    ("fdp",),
    "fdp-accumulates",
)


def _tables(setting: Setting, figures: Mapping[str, Figures]) -> list[Table]:
    return [comparison(setting, figures), everybody(setting, figures)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    args = options(__doc__, {"ranks": SETTING}).parse_args(arguments)

    def of_case(setting: Setting, case: str, begin: Begin) -> Figures:
        return measure(setting, case, args.rounds, not args.no_memory, begin)

    return carry_out(args, {"ranks": SETTING}, of_case, _tables)


if __name__ == "__main__":
    sys.exit(main())
