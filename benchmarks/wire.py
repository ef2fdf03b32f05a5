"""Fewer bytes: fdp's steps with gradients in sixteen bits beside full width, on two hosts with a shaped link.

    python benchmarks/wire.py [--setting NAME]... [--case NAME]... [--rounds N] [--json FILE]

Settings: "lab-1gbit" and "lab-200mbit", as in overlap.py; they need root, ip and tc. docs/explanation/benchmarks.md
says more.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from command import Begin, carry_out, options
from contenders import FDP_WIRE
from figures import Setting
from overlap import SETTINGS as OVERLAP
from rich.table import Table
from step_time import Entry, StepTimes, measure_entries, paired_ratio
from tables import markdown_table, quartiles, verdict

TARGETS = {"mlp-20m": 0.62}
"""At most so much of the full-width step; of cases where communication takes most of it."""

SETTINGS = {
    name: dataclasses.replace(OVERLAP[name], ours="fdp-bf16", peers=("fdp",), peer="full width", also=FDP_WIRE[1:])
    for name in ("lab-1gbit", "lab-200mbit")
}


@dataclasses.dataclass(frozen=True)
class Wire:
    """What was measured of one case.

    Attributes:
        times: contender to its times.
    """

    times: dict[str, StepTimes]

    def seconds(self, name: str) -> list[float]:
        """The median step of each round."""
        return [statistics.median(turn) for turn in self.times[name].host_s]

    def as_json(self) -> dict[str, Any]:
        """All that was measured, as plain dicts and lists."""
        return dataclasses.asdict(self)


def _tables(setting: Setting, rows: Mapping[str, Wire]) -> list[Table]:
    out = markdown_table("case", "contender", "step, ms", "of full width (quartiles)", "target")
    for case, row in rows.items():
        for name in (*setting.peers, setting.ours, *setting.also):
            ratio = paired_ratio(row.seconds(name), row.seconds("fdp"))
            aim = "" if name == "fdp" else verdict(ratio[1], TARGETS.get(case))
            out.add_row(case, name, f"{statistics.median(row.seconds(name)) * 1e3:.1f}", quartiles(ratio), aim)
    return [out]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    args = options(__doc__, SETTINGS, memory=False, rounds="turns of each contender (default: 9)").parse_args(arguments)

    def of_case(setting: Setting, case: str, begin: Begin) -> Wire:
        # Rounded gradients do not train to the same digits; the tests compare them with a loop that rounds alike.
        entries = [Entry(name, name, setting.place, name == "fdp") for name in ("fdp", *FDP_WIRE)]
        tell = begin(f"{case}: {len(entries)} contenders, {setting.title}")
        return Wire(measure_entries(case, entries, args.rounds or 9, tell, lambda name, crew: None))

    return carry_out(args, SETTINGS, of_case, _tables)


if __name__ == "__main__":
    sys.exit(main())
