"""fdp beside DistributedDataParallel in its best setting, and beside plain PyTorch: step time and memory.

    python benchmarks/run.py [--setting NAME]... [--case NAME]... [--peer NAME]... [--rounds N] [--no-memory]
                             [--json FILE]

Settings: "ranks" is two gloo ranks on this machine, one thread each, beside DDP; "one" is one process of one thread
without a process group, beside plain PyTorch; "gpu" is an NCCL group of one rank. Everybody runs the fused AdamW.
docs/explanation/benchmarks.md says what is measured, and how.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import gpu
from cases import CPU_CASES
from command import Begin, among, carry_out, options
from contenders import DDP
from figures import Figures, Setting, measure
from launch import Place
from rich.table import Table
from tables import comparison, everybody

RANKS = Setting("ranks", "two gloo ranks", Place(2, "gloo"), CPU_CASES, DDP, "best DDP")
ONE = Setting("one", "one process", Place(1, None), CPU_CASES, ("eager",), "eager")
SETTINGS = {setting.name: setting for setting in (RANKS, ONE, gpu.SETTING)}


def _tables(setting: Setting, figures: Mapping[str, Figures]) -> list[Table]:
    first = gpu.tables(figures, setting) if setting.name == gpu.SETTING.name else [comparison(setting, figures)]
    return [*first, everybody(setting, figures)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    parser = options(__doc__, SETTINGS)
    parser.add_argument("--peer", action="append", choices=DDP, help="only this one beside fdp; may be repeated")
    args = parser.parse_args(arguments)
    settings = SETTINGS if args.peer is None else {name: among(args.peer, each) for name, each in SETTINGS.items()}

    def of_case(setting: Setting, case: str, begin: Begin) -> Figures:
        return measure(setting, case, args.rounds, not args.no_memory, begin)

    return carry_out(args, settings, of_case, _tables)


if __name__ == "__main__":
    sys.exit(main())
