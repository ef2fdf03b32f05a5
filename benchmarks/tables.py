"""The figures as tables that are Markdown as well, so that they can be put into a document as they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from cases import CASES
from figures import Figures, Setting
from rich import box
from rich.table import Table
from step_time import Quartiles


def comparison(setting: Setting, figures: Mapping[str, Figures]) -> Table:
    """A row a case: fdp beside the best of its peers, and whether the targets are reached."""
    out = markdown_table(
        "case", f"{setting.ours}, ms", f"{setting.peer}, ms", "time ratio (quartiles)", "target",
        f"{setting.ours}, MiB", f"{setting.peer}, MiB", "memory ratio", "target",
    )  # fmt: skip
    for name, row in figures.items():
        case = CASES[name]
        peer = row.fastest(setting.peers)
        ratio = row.time_ratio(setting.ours, peer)
        cells = [
            milliseconds(row, setting.ours), _named(milliseconds(row, peer), peer, setting),
            quartiles(ratio), verdict(ratio[1], case.time_target),
        ]  # fmt: skip
        if row.memory:
            peer = row.leanest(setting.peers)
            used = row.memory_ratio(setting.ours, peer)
            cells += [
                mebibytes(row.memory[setting.ours].tensors_above_bytes),
                _named(mebibytes(row.memory[peer].tensors_above_bytes), peer, setting),
                f"{used:.2f}", verdict(used, case.memory_target),
            ]  # fmt: skip
        else:
            cells += ["not measured"] * 3 + [verdict(None, case.memory_target)]
        out.add_row(name, *cells)
    return out


def everybody(setting: Setting, figures: Mapping[str, Figures]) -> Table:
    """A row a case and contender, with the figures that have no target."""
    out = markdown_table(
        "case", "contender", "step, ms", f"of {setting.peer}'s time (quartiles)",
        "page faults", "persistent, MiB", "tensors above, MiB", "process above, MiB",
    )  # fmt: skip
    for case, row in figures.items():
        peer = row.fastest(setting.peers)
        for name in row.times:
            cells = [milliseconds(row, name), "1" if name == peer else quartiles(row.time_ratio(name, peer))]
            cells.append(f"{row.page_faults(name):.0f}")
            used = row.memory.get(name)
            if used is None:
                cells += ["not measured"] * 3
            else:
                cells += [mebibytes(used.live_bytes), mebibytes(used.tensors_above_bytes)]
                above = used.process_above_bytes
                cells.append("not measured" if above is None else mebibytes(above))
            out.add_row(case, name, *cells)
    return out


def markdown_table(*columns: str) -> Table:
    """An empty table with these columns."""
    out = Table(box=box.MARKDOWN)
    for column in columns:
        out.add_column(column, no_wrap=True)
    return out


def _named(cell: str, peer: str, setting: Setting) -> str:
    return cell if len(setting.peers) == 1 else f"{cell} ({peer})"


def milliseconds(row: Figures, name: str, clock: str = "host") -> str:
    """A contender's step: the median of its rounds."""
    return f"{statistics.median(row.seconds(name, clock)) * 1e3:.2f}"


def mebibytes(size_bytes: int) -> str:
    """A size in MiB."""
    return f"{size_bytes / 2**20:.2f}"


def quartiles(ratio: Quartiles) -> str:
    """The median first, since it is the figure."""
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(figure: float | None, target: float | None) -> str:
    """The target, and whether a figure, as it is printed, reaches it."""
    if target is None:
        return "-"
    if figure is None:
        return f"<= {target:.2f}"
    return f"<= {target:.2f} {'reached' if round(figure, 2) <= target else 'missed'}"
