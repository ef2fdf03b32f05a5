"""fdp of another working tree beside that of this one: step time, and the time of a first call.

    git worktree add --detach ../before COMMIT
    python benchmarks/before_after.py ../before [--setting NAME]... [--case NAME]... [--rounds N] [--starts N]

Both run the benchmarks of this tree, in fresh processes that take turns, as in `benchmarks/run.py`. The tree before
runs twice: how far its two runs are apart is what this machine cannot tell. With a plan for each: measured costs may
lead to other buckets in another process, which is then a difference that is not the code's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cases import CASES
from command import Begin, carry_out, options, positive
from contenders import CONTENDERS, Contender, SamenessCheck
from figures import Figures, Setting
from launch import Crew, run_in
from rich.table import Table
from run import ONE, RANKS
from step_time import StepTimes, Trainer, align, paired_ratio, take_turns, turns, warm_up

BEFORE, AGAIN, AFTER = "before", "before again", "after"
HERE = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        times: tree to its step times.
        buckets: tree to the number of buckets of its plan.
        starts_s: tree to the times of first calls, in the order of the rounds; seconds, on the slowest rank.
    """

    times: dict[str, StepTimes]
    buckets: dict[str, int]
    starts_s: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain dicts and lists."""
        return dataclasses.asdict(self)


def _buckets(running: Contender) -> int:
    assert running.planned is not None
    return len(running.planned()[0].buckets)


def _first_call(case_name: str, contender: str) -> float:
    running = CONTENDERS[contender](CASES[case_name])
    align(CASES[case_name])
    begun = time.perf_counter()
    running.step()
    return time.perf_counter() - begun


def measure(setting: Setting, case: str, trees: Mapping[str, str], args: argparse.Namespace, begin: Begin) -> Row:
    """Measures one case: steps, then first calls.

    Args:
        setting: where.
        case: a key of `cases.CASES`.
        trees: name to folder.
        args: the command line.
        begin: given what is measured next; returns whom to tell how far that is.
    """
    places = {name: dataclasses.replace(setting.place, tree=tree) for name, tree in trees.items()}
    tell = begin(f"{case}: step time, {setting.title}")
    with contextlib.ExitStack() as stack:
        same, crews = SamenessCheck(CASES[case]), {}
        for name, place in places.items():
            crews[name] = stack.enter_context(Crew(place, Trainer, case, args.contender))
            warm_up(name, crews[name], [same.add])
        times = take_turns(crews, args.rounds or CASES[case].rounds, tell)
        buckets = {name: crew.ask("tell", _buckets)[0] for name, crew in crews.items()}
    tell = begin(f"{case}: first calls, {setting.title}")
    starts: dict[str, list[float]] = {name: [] for name in trees}
    for i, order in enumerate(turns(list(trees), args.starts)):
        for name in order:
            starts[name].append(max(run_in(places[name], _first_call, case, args.contender)))
        tell(i + 1, args.starts)
    return Row(times, buckets, starts)


def _table(setting: Setting, rows: Mapping[str, Row]) -> Table:
    table = Table(title=f"{setting.title}: medians; ratios to the tree before, median [quartiles]")
    table.add_column("case")
    for name in ("buckets", "step before, ms", "after", "after / before", "again / before", "first call before, s",
                 "after", "after / before", "again / before"):  # fmt: skip
        table.add_column(name, justify="right")
    for case, row in rows.items():
        steps = {name: Figures(row.times, {}).seconds(name) for name in row.times}
        cells = [" ".join(str(row.buckets[name]) for name in (BEFORE, AGAIN, AFTER))]
        for unit, found in ((1e3, steps), (1.0, row.starts_s)):
            cells += [f"{statistics.median(found[name]) * unit:.2f}" if found[name] else "" for name in (BEFORE, AFTER)]
            cells += [_ratio(found[name], found[BEFORE]) for name in (AFTER, AGAIN)]
        table.add_row(case, *cells)
    return table


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not ours:
        return ""
    low, middle, high = paired_ratio(ours, theirs)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> int:
    """Measures, and prints a table for each setting."""
    settings = {setting.name: dataclasses.replace(setting, ours="after", peer="before") for setting in (RANKS, ONE)}
    parser = options(__doc__, settings, memory=False)
    parser.add_argument("before", type=pathlib.Path, help="the other working tree")
    parser.add_argument("--starts", type=positive, default=7, help="first calls of each tree")
    parser.add_argument("--contender", default="fdp", choices=sorted(CONTENDERS), help="default: fdp")
    args = parser.parse_args()
    before = str(args.before.resolve())
    trees = {BEFORE: before, AFTER: str(HERE), AGAIN: before}

    def of_case(setting: Setting, case: str, begin: Begin) -> Row:
        return measure(setting, case, trees, args, begin)

    return carry_out(args, settings, of_case, lambda setting, rows: [_table(setting, rows)])


if __name__ == "__main__":
    sys.exit(main())
