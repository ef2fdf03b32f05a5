"""How well communication hides behind computation: fdp beside DDP on a simulated card, and on a shaped network.

    python benchmarks/overlap.py [--setting NAME]... [--case NAME]... [--rounds N] [--short] [--json FILE]
    python benchmarks/overlap.py --tables FILE [FILE ...]

The second prints the tables of figures that --json has written, of several runs together.

Settings: "card-10gbit-16" is one process whose simulated network card (see card.py) claims 16 ranks in a ring, at
10 Gbit/s and 5 us from one to the next; likewise 100 Gbit/s, and 256 ranks. "lab-1gbit" and "lab-200mbit" are two
hosts with gloo between them, namespaces of this machine with shaped links (see lab.py); they need root, ip and tc.

All train with the fused AdamW on one thread a rank, interleaved: DDP at its default and with fixed caps, fdp with
bucket_cap_mb="auto" (which is its default) and with the same caps. So do, to know what is possible,

- compute: fdp's step without a process group, all of it: forward, backward, optimizer. In the lab as many processes
  as there are hosts do so at the same time. eager is the same in plain PyTorch.
- forward: forward pass and loss in plain PyTorch.
- comm: one all-reduce of as many bytes as there are gradients. On a card it is not measured but computed.

The bound of a round is max(compute, forward + comm): all of compute has to be done, and no gradient can be sent before
the forward pass is over. No schedule reaches it quite: the first gradient comes after some of the backward pass, and
the update of the last one after its message.

What is predicted of fdp's steps is `Plan.timeline` with operations and network as fdp measures them once all times are
taken; it does not know the numbers that the card simulates.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from card import Link, card_place, idle_times, lateness
from cases import CASES, CPU_CASES
from command import Begin, carry_out, options
from contenders import DDP_CAPS, FDP_CAPS, Contender, gradient_bytes
from figures import Setting
from lab import lab_place
from launch import Crew, Place, run_in
from prediction import Prediction, predict
from rich.console import Console
from rich.table import Table
from step_time import Entry, Quartiles, StepTimes, measure_entries, paired_ratio
from tables import markdown_table, quartiles, verdict

import fdp

_CASES = tuple(case for case in CPU_CASES if case.name in ("mlp-20m", "resnet18", "gpt-10m"))
_HOP_S = 5e-6
_ALONE = {"compute": "fdp", "eager": "eager", "forward": "forward"}
_BEST_DDP, _BEST_CAP = "best DDP", "best cap"


def _card(gbit: int, ranks: int) -> Setting:
    place = card_place(Link(ranks, _HOP_S, gbit * 1e9 / 8))
    title = f"simulated card, {ranks} ranks in a ring, {gbit} Gbit/s, {_HOP_S * 1e6:g} us a hop"
    return Setting(f"card-{gbit}gbit-{ranks}", title, place, _CASES, DDP_CAPS, _BEST_DDP, FDP_CAPS)


def _lab(mbit: int, name: str) -> Setting:
    place = lab_place(mbit * 1e6)
    return Setting(f"lab-{name}", f"two hosts, gloo, {mbit} Mbit/s", place, _CASES, DDP_CAPS, _BEST_DDP, FDP_CAPS)


SETTINGS = {
    setting.name: setting
    for setting in (
        *(_card(gbit, ranks) for gbit in (10, 100) for ranks in (16, 256)),
        _lab(1000, "1gbit"),
        _lab(200, "200mbit"),
    )
}
SHORT = ("card-10gbit-16", "lab-1gbit")


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What was measured of one case in one setting.

    Attributes:
        times: contenders, and what bounds them, to their times.
        comm_s: seconds of communication alone, where they are not among the times.
        late_s: contender to by how many seconds each of its messages was completed late by the card.
        idle: all-reduces of an idle card: bytes, seconds that they should take, seconds that they took.
        predicted: contender to what fdp predicts of its step.
    """

    times: dict[str, StepTimes]
    comm_s: float | None
    late_s: dict[str, list[float]]
    idle: list[tuple[int, float, float]]
    predicted: dict[str, Prediction | None]

    def seconds(self, name: str) -> list[float]:
        """The median step of each round."""
        return [statistics.median(turn) for turn in self.times[name].host_s]

    def median(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds(name))

    def comm(self) -> list[float]:
        """Seconds of communication alone in each round."""
        if self.comm_s is None:
            return self.seconds("comm")
        return [self.comm_s] * len(self.seconds("compute"))

    def bound(self) -> list[float]:
        """The bound of each round, in seconds."""
        rounds = zip(self.seconds("compute"), self.seconds("forward"), self.comm(), strict=True)
        return [max(compute, forward + comm) for compute, forward, comm in rounds]

    def fastest(self, names: Sequence[str]) -> str:
        """The one whose median step takes the least time."""
        return min(names, key=self.median)

    def ratio(self, name: str, peer: str) -> Quartiles:
        """Quartiles of one's time divided by another's in the same round."""
        return paired_ratio(self.seconds(name), self.seconds(peer))

    def of_bound(self, name: str) -> Quartiles:
        """Quartiles of one's time divided by the bound of the same round."""
        return paired_ratio(self.seconds(name), self.bound())

    def as_json(self) -> dict[str, Any]:
        """All that was measured, as plain dicts and lists."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Overlap:
        """What `as_json` was made of."""
        times = {name: StepTimes(**given) for name, given in kept["times"].items()}
        predicted: dict[str, Prediction | None] = {}
        for name, given in kept["predicted"].items():
            predicted[name] = given and Prediction(**{**given, "network": fdp.Network(**given["network"])})
        idle = [(size, due, took) for size, due, took in kept["idle"]]
        return cls(times, kept["comm_s"], kept["late_s"], idle, predicted)


def measure(setting: Setting, case: str, rounds: int, begin: Begin) -> Overlap:
    """Measures one case in one setting.

    Args:
        setting: where; its place is open.
        case: a key of `cases.CASES`.
        rounds: turns of each contender.
        begin: given what is measured next; returns whom to tell how far that is.

    Returns:
        The figures.
    """
    place = setting.place
    link: Link | None = getattr(place, "link", None)
    entries = [Entry(name, name, place) for name in (*setting.peers, *setting.also, setting.ours)]
    entries += [Entry(name, contender, place.without_group(), False) for name, contender in _ALONE.items()]
    if link is None:
        entries.append(Entry("comm", "communication", place, False))
    late_s: dict[str, list[float]] = {}
    predicted: dict[str, Prediction | None] = {}

    def afterwards(name: str, crew: Crew) -> None:
        late_s[name] = crew.ask("tell", _lateness)[0]
        predicted[name] = crew.ask("tell", predict)[0]

    tell = begin(f"{case}: {len(entries)} contenders, {setting.title}")
    times = measure_entries(case, entries, rounds, tell, afterwards)
    if link is None:
        return Overlap(times, None, late_s, [], predicted)
    comm_s = link.all_reduce_s(gradient_bytes(CASES[case]))
    return Overlap(times, comm_s, late_s, _idle(place, link), predicted)


def _lateness(running: Contender) -> list[float]:
    return lateness()


def _idle(place: Place, link: Link) -> list[tuple[int, float, float]]:
    found: list[tuple[int, float, float]] = run_in(place, idle_times, link, [4, 2**20, 25 * 2**20])[0]
    return found


def targets(setting: Setting, case: str) -> tuple[float | None, float | None, float | None, float]:
    """What fdp's time is to be at most: of the best DDP's, of DDP's default, of the best fixed cap's, of the bound."""
    if setting.place.backend == "card":
        return None, None, 1.02, 1.03
    of_default = 0.80 if (setting.name, case) == ("lab-1gbit", "gpt-10m") else None
    return 1.00, of_default, None, 1.05


def limits(rows: Mapping[str, Overlap]) -> Table:
    """A row a case: what bounds it."""
    out = markdown_table("case", "eager, ms", "compute, ms", "forward, ms", "comm, ms", "bound, ms")
    for case, row in rows.items():
        seconds = [row.median(name) for name in ("eager", "compute", "forward")]
        seconds += [statistics.median(row.comm()), statistics.median(row.bound())]
        out.add_row(case, *(f"{s * 1e3:.1f}" for s in seconds))
    return out


def summary(setting: Setting, rows: Mapping[str, Overlap]) -> Table:
    """Rows for each case: fdp's default beside the best of DDP, DDP's default, the best fixed cap, and the bound."""
    out = markdown_table("case", "fdp auto, ms", "beside", "ms", "ratio (quartiles)", "target")
    for case, row in rows.items():
        best, cap = row.fastest(setting.peers), row.fastest(setting.also)
        ours = f"{row.median(setting.ours) * 1e3:.1f}"
        beside = [
            (f"best DDP ({best})", row.median(best), row.ratio(setting.ours, best)),
            ("DDP's default", row.median("ddp"), row.ratio(setting.ours, "ddp")),
            (f"best fixed cap ({cap})", row.median(cap), row.ratio(setting.ours, cap)),
            ("the bound", statistics.median(row.bound()), row.of_bound(setting.ours)),
        ]
        for (name, seconds, ratio), target in zip(beside, targets(setting, case), strict=True):
            out.add_row(case, ours, name, f"{seconds * 1e3:.1f}", quartiles(ratio), verdict(ratio[1], target))
    return out


def everybody(setting: Setting, rows: Mapping[str, Overlap]) -> Table:
    """A row a case and contender."""
    out = markdown_table(
        "case", "contender", "step, ms", "of best DDP's (quartiles)", "of the bound (quartiles)",
        "predicted, ms", "of measured", "exposed", "buckets", "messages late by, us: median, 99%, most",
    )  # fmt: skip
    for case, row in rows.items():
        best = row.fastest(setting.peers)
        for name in (*setting.peers, *setting.also, setting.ours):
            ratio = "1" if name == best else quartiles(row.ratio(name, best))
            cells = [f"{row.median(name) * 1e3:.1f}", ratio, quartiles(row.of_bound(name))]
            out.add_row(case, name, *cells, *_predicted_cells(row, name), _late(row.late_s[name]))
    return out


def _predicted_cells(row: Overlap, name: str) -> list[str]:
    found = row.predicted[name]
    if found is None:
        return ["-"] * 4
    step, exposed = found.step_s, found.exposed_s
    of_measured = f"{step / row.median(name):.2f}"
    return [f"{step * 1e3:.1f}", of_measured, f"{exposed * 1e3:.1f}", str(len(found.buckets_mib))]


def _late(late_s: Sequence[float]) -> str:
    if not late_s:
        return "-"
    shares = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
    found = torch.tensor(late_s, dtype=torch.float64).quantile(shares) * 1e6
    return ", ".join(f"{us:.0f}" for us in found.tolist())


def predictions(setting: Setting, rows: Mapping[str, Overlap]) -> Table:
    """A row a case: by how much what was predicted is off, and whether it has the fixed caps in the right order."""
    columns = (
        "predicted of measured, least and most",
        "target",
        "caps told apart",
        "predicted in that order",
        "target",
    )
    out = markdown_table("case", *columns)
    for case, row in rows.items():
        shares, apart = _predicted(setting, row)
        off = max(abs(share - 1) for share in shares)
        out.add_row(
            case, f"{min(shares):.2f} to {max(shares):.2f}", f"within 15% {'reached' if off <= 0.15 else 'missed'}",
            f"{len(apart)} of {math.comb(len(setting.also), 2)} pairs", str(sum(apart)),
            f"all {'reached' if all(apart) else 'missed'}",
        )  # fmt: skip
    return out


def _predicted(setting: Setting, row: Overlap) -> tuple[list[float], list[bool]]:
    """What was predicted as a share of what was measured; and of pairs of caps, whether it has them in the right order.

    Two caps have an order where one was faster than the other in three quarters of the rounds or more.
    """
    found = {name: row.predicted[name] for name in (*setting.also, setting.ours)}
    steps = {name: prediction.step_s for name, prediction in found.items() if prediction is not None}
    apart = []
    for one, two in itertools.combinations(setting.also, 2):
        low, _, high = row.ratio(one, two)
        if low > 1 or high < 1:
            apart.append((steps[one] > steps[two]) == (low > 1))
    return [step_s / row.median(name) for name, step_s in steps.items()], apart


def overview(found: Mapping[str, Mapping[str, Overlap]]) -> Table:
    """A row a setting and case: all that has a target; what misses its target has a star."""
    out = markdown_table(
        "setting", "case", "fdp auto, ms", "of best DDP", "of DDP's default", "of best fixed cap", "of the bound",
        "predicted of measured", "caps in order",
    )  # fmt: skip
    for name, rows in found.items():
        setting = SETTINGS[name]
        for case, row in rows.items():
            beside = [row.ratio(setting.ours, row.fastest(setting.peers)), row.ratio(setting.ours, "ddp")]
            beside += [row.ratio(setting.ours, row.fastest(setting.also)), row.of_bound(setting.ours)]
            cells = []
            for ratio, target in zip(beside, targets(setting, case), strict=True):
                cells.append(quartiles(ratio) + (" *" if "missed" in verdict(ratio[1], target) else ""))
            shares, apart = _predicted(setting, row)
            star = " *" if max(abs(share - 1) for share in shares) > 0.15 else ""
            cells.append(f"{min(shares):.2f} to {max(shares):.2f}{star}")
            cells.append(f"{sum(apart)} of {len(apart)}{'' if all(apart) else ' *'}")
            out.add_row(name, case, f"{row.median(setting.ours) * 1e3:.1f}", *cells)
    return out


def networks(setting: Setting, rows: Mapping[str, Overlap]) -> Table:
    """A row a case: the network as it was measured for the prediction of fdp's default."""
    columns = ("latency, us", "bandwidth, MB/s", "in flight", "computing slows down by")
    out = markdown_table("case", *columns)
    for case, row in rows.items():
        found = row.predicted[setting.ours]
        assert found is not None
        n = found.network
        rate = f"{n.bandwidth_bytes_per_s / 1e6:.1f}"
        out.add_row(case, f"{n.latency_s * 1e6:.1f}", rate, str(n.in_flight), f"{n.compute_slowdown:.2f}")
    link: Link | None = getattr(setting.place, "link", None)
    if link is not None:
        out.add_row("as claimed", f"{link.latency_s * 1e6:.1f}", f"{link.bandwidth_bytes_per_s / 1e6:.1f}", "1", "0.00")
    return out


def idle_card(rows: Mapping[str, Overlap]) -> Table:
    """A row a size of message: how exact a card is that has nothing else to do."""
    out = markdown_table("all-reduce on an idle card, bytes", "due, ms", "took, ms")
    for size, due, took in next(iter(rows.values())).idle:
        out.add_row(str(size), f"{due * 1e3:.3f}", f"{took * 1e3:.3f}")
    return out


def _tables(setting: Setting, rows: Mapping[str, Overlap]) -> list[Table]:
    tables = [limits(rows), summary(setting, rows), predictions(setting, rows), everybody(setting, rows)]
    tables.append(networks(setting, rows))
    return [*tables, idle_card(rows)] if setting.place.backend == "card" else tables


def print_kept(paths: Sequence[pathlib.Path]) -> int:
    """Prints figures that were written to files; of a case that is in several, those of the last."""
    console = Console(width=240)
    found: dict[str, dict[str, Overlap]] = {}
    for path in paths:
        kept = json.loads(path.read_text())
        console.print(f"{path.name}: {', '.join(f'{k} {v}' for k, v in kept['machine'].items())}")
        for setting, rows in kept["figures"].items():
            found.setdefault(setting, {}).update((case, Overlap.of_json(row)) for case, row in rows.items())
    for setting, measured in found.items():
        console.print(f"\n{SETTINGS[setting].title}\n")
        for table in _tables(SETTINGS[setting], measured):
            console.print(table)
    console.print("\nAll together; a star stands where a target is missed\n", overview(found))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the figures to a file if asked to."""
    parser = options(__doc__, SETTINGS, memory=False, rounds="turns of each contender (default: 9; 3 with --short)")
    parser.add_argument("--short", action="store_true", help=f"fewer rounds, and only {' and '.join(SHORT)}")
    parser.add_argument("--tables", nargs="+", type=pathlib.Path, metavar="FILE", help="print kept figures")
    args = parser.parse_args(arguments)
    if args.tables:
        return print_kept(args.tables)
    if args.short and not args.setting:
        args.setting = list(SHORT)
    rounds = args.rounds or (3 if args.short else 9)

    def of_case(setting: Setting, case: str, begin: Begin) -> Overlap:
        return measure(setting, case, rounds, begin)

    return carry_out(args, SETTINGS, of_case, _tables)


if __name__ == "__main__":
    sys.exit(main())
