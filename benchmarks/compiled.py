"""Compiled steps: fdp's beside DDP with torch.compile: step time, time until a step is ready, and memory.

    python benchmarks/compiled.py [--setting NAME]... [--case NAME]... [--peer NAME]... [--rounds N] [--starts N]
                                  [--no-memory] [--json FILE]

Settings: "ranks" is two gloo ranks on this machine, one thread each, beside DDP with torch.compile; "one" is one
process of one thread, beside torch.compile; "gpu" is an NCCL group of one rank. Everybody runs the fused AdamW.
docs/explanation/benchmarks.md says what is measured, and how.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import gpu
from cases import CASES, COMPILED_CASES
from command import Begin, among, carry_out, number, options
from contenders import DDP, DDP_COMPILE
from figures import Figures, Setting, measure
from launch import Place
from rich.table import Table
from startup import Starts, measure_starts
from step_time import Quartiles, paired_ratio
from tables import everybody, markdown_table, mebibytes, milliseconds, quartiles, verdict

OURS = "fdp-compile"
RANKS = Setting(
    "ranks", "two gloo ranks", Place(2, "gloo"), COMPILED_CASES, DDP_COMPILE, "best DDP + compile", (*DDP, "fdp"), OURS
)
ONE = Setting(
    "one", "one process", Place(1, None), COMPILED_CASES, ("eager-compile",), "eager + compile", ("eager", "fdp"), OURS
)
SETTINGS = {setting.name: setting for setting in (RANKS, ONE, gpu.COMPILED)}
PLAIN = {RANKS.name: (DDP, "best DDP"), ONE.name: (("eager",), "eager"), gpu.COMPILED.name: (DDP, "best DDP")}
"""The peers that are not compiled, and what to call the best of them."""
RECORDED = {"host-bound-gpu": "fdp-compile-graphs"}
"""Cases that fdp runs as one CUDA graph."""

START_TARGET, SECOND_TARGET = 1.0, 0.33
"""A first start is to take at most so much of the best compiled peer's, and a second one so much of the first."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        figures: of the steps.
        starts: contender to its starts.
    """

    figures: Figures
    starts: dict[str, Starts]

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain dicts and lists."""
        return dataclasses.asdict(self)


def _measure(setting: Setting, case: str, rounds: int | None, starts: int, with_memory: bool, begin: Begin) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        place = dataclasses.replace(setting.place, cache=folder)
        names = [*setting.peers, *(name for name in setting.also if name.startswith("fdp")), setting.ours]
        found: dict[str, Starts] = {}
        if starts:
            tell = begin(f"{case}: starts of {len(names)} contenders, {setting.title}")
            found = measure_starts(place, case, names, starts, tell)
        # After the starts, in the same folder: what they compiled need not be compiled again.
        figures = measure(dataclasses.replace(setting, place=place), case, rounds, with_memory, begin)
    return Row(figures, found)


def _ours(case: str, measured: Mapping[str, object]) -> str:
    return RECORDED[case] if RECORDED.get(case) in measured else OURS


def _tables(setting: Setting, rows: Mapping[str, Row]) -> list[Table]:
    figures = {case: row.figures for case, row in rows.items()}
    clocks = ("host", "device") if setting.place.backend == "nccl" else ("host",)
    tables = [_times(setting, figures, clock) for clock in clocks]
    started = all(row.starts for row in rows.values())
    if started:
        tables.append(_starts(setting, rows))
    if all(row.memory for row in figures.values()):
        tables.append(_memory(setting, figures))
    if started:
        tables.append(_every_start(rows))
    return [*tables, everybody(setting, figures)]


def _target(setting: Setting, target: float | None) -> float | None:
    # Nothing was set for one process.
    return None if setting is ONE else target


def _times(setting: Setting, figures: Mapping[str, Figures], clock: str) -> Table:
    peers, peer = PLAIN[setting.name]
    unit = f"{clock} ms" if setting.place.backend == "nccl" else "ms"
    out = markdown_table(
        "case", f"{OURS}, {unit}", f"{setting.peer}, {unit}", "time ratio (quartiles)", "target", f"{peer}, {unit}",
        "time ratio (quartiles)",
    )  # fmt: skip
    for case, row in figures.items():
        ours = _ours(case, row.times)
        compiled = row.fastest(setting.peers, clock)
        ratio = row.time_ratio(ours, compiled, clock)
        beside_plain = ["-", "-"]
        if measured := [name for name in peers if name in row.times]:
            plain = row.fastest(measured, clock)
            beside_plain = [
                _named(milliseconds(row, plain, clock), plain), quartiles(row.time_ratio(ours, plain, clock))
            ]  # fmt: skip
        out.add_row(
            case, _named(milliseconds(row, ours, clock), ours), _named(milliseconds(row, compiled, clock), compiled),
            quartiles(ratio), verdict(ratio[1], _target(setting, CASES[case].compiled_target)), *beside_plain,
        )  # fmt: skip
    return out


def _starts(setting: Setting, rows: Mapping[str, Row]) -> Table:
    out = markdown_table(
        "case", f"{OURS}, s", f"{setting.peer}, s", "ratio (quartiles)", "target", "second start, s",
        "of the first (quartiles)", "target", f"{setting.peer}, second start, s",
    )  # fmt: skip
    for case, row in rows.items():
        name = _ours(case, row.starts)
        ours = row.starts[name]
        first = min(setting.peers, key=lambda peer: statistics.median(row.starts[peer].first_s))
        second = min(setting.peers, key=lambda peer: statistics.median(row.starts[peer].second_s))
        ratio, again = paired_ratio(ours.first_s, row.starts[first].first_s), paired_ratio(ours.second_s, ours.first_s)
        out.add_row(
            case, _named(_seconds(ours.first_s), name), _named(_seconds(row.starts[first].first_s), first),
            *_judged(ratio, _target(setting, START_TARGET)), _seconds(ours.second_s),
            *_judged(again, _target(setting, SECOND_TARGET)), _named(_seconds(row.starts[second].second_s), second),
        )  # fmt: skip
    return out


def _memory(setting: Setting, figures: Mapping[str, Figures]) -> Table:
    peers, peer = PLAIN[setting.name]
    out = markdown_table(
        "case", f"{OURS}, MiB above", f"{setting.peer}, MiB above", "memory ratio", f"{peer}, MiB above",
        "memory ratio",
    )  # fmt: skip
    for case, row in figures.items():
        ours = _ours(case, row.times)
        cells = [_named(mebibytes(row.memory[ours].tensors_above_bytes), ours)]
        for names in (setting.peers, [name for name in peers if name in row.memory]):
            if not names:
                cells += ["-", "-"]
                continue
            best = row.leanest(names)
            cells.append(_named(mebibytes(row.memory[best].tensors_above_bytes), best))
            cells.append(f"{row.memory_ratio(ours, best):.2f}")
        out.add_row(case, *cells)
    return out


def _every_start(rows: Mapping[str, Row]) -> Table:
    out = markdown_table("case", "contender", "first start, s", "second start, s")
    for case, row in rows.items():
        for name, starts in row.starts.items():
            out.add_row(case, name, _seconds(starts.first_s), _seconds(starts.second_s))
    return out


def _judged(ratio: Quartiles, target: float | None) -> tuple[str, str]:
    return quartiles(ratio), verdict(ratio[1], target)


def _seconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f}"


def _named(cell: str, name: str) -> str:
    return cell if name == OURS else f"{cell} ({name})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    parser = options(__doc__, SETTINGS)
    parser.add_argument(
        "--starts", type=number, default=1, help="first starts of each contender, and second ones; 0 leaves them out"
    )
    known = dict.fromkeys(name for each in SETTINGS.values() for name in (*each.peers, *each.also))
    parser.add_argument(
        "--peer", action="append", choices=known, help="only this one beside fdp; may be repeated, one of them compiled"
    )
    args = parser.parse_args(arguments)
    if args.peer and not any(set(args.peer) & set(each.peers) for each in SETTINGS.values()):
        parser.error("one --peer has to be compiled: fdp's compiled step is compared with it")
    settings = SETTINGS if args.peer is None else {name: among(args.peer, each) for name, each in SETTINGS.items()}

    def of_case(setting: Setting, case: str, begin: Begin) -> Row:
        return _measure(setting, case, args.rounds, args.starts, not args.no_memory, begin)

    return carry_out(args, settings, of_case, _tables)


if __name__ == "__main__":
    sys.exit(main())
