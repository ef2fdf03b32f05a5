"""Draw how a step scales: its time and its efficiency against the number of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fdp.plan.scaling import Scaling
from fdp.tables import count
from fdp.timeline.style import (
    BLUE,
    FONT,
    GRID,
    INK,
    RED,
    SKY,
    WIDTH_IN,
    check_path,
    new_figure,
    open_frame,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = (
    ("replanned_s", "fdp, planned for each size", BLUE, "-", "o"),
    ("planned_s", "fdp, planned for {}", SKY, "--", "s"),
    ("ddp_s", "DDP's default", RED, "-", "^"),
)


def draw_scaling(scaling: Scaling, path: str | os.PathLike[str] | None) -> Figure:
    """Draw both panels; see `Scaling.draw`."""
    check_path(path)
    figure = new_figure(WIDTH_IN, 3.6)
    sizes = [scale.world_size for scale in scaling.scales]
    left = figure.add_axes((0.07, 0.14, 0.29, 0.68))
    right = figure.add_axes((0.45, 0.14, 0.29, 0.68))
    for axes, what in ((left, "ms a step"), (right, "efficiency: share of a rank's work alone, %")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes if len(sizes) <= 6 else sizes[:: -(-len(sizes) // 6)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("ranks", fontsize=FONT)
        axes.set_title(what, loc="left", fontsize=FONT + 1, color=INK)
        axes.tick_params(labelsize=FONT)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        open_frame(axes)
    ends: list[tuple[float, str, str]] = []
    for attribute, name, colour, dash, mark in _LINES:
        seconds = [getattr(scale, attribute) for scale in scaling.scales]
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4, "linewidth": 1.8}
        left.plot(sizes, [s * 1e3 for s in seconds], **style)
        shares = [scaling.efficiency(s) * 100 for s in seconds]
        right.plot(sizes, shares, **style)
        ends.append((shares[-1], name.format(count(scaling.planned_for, "rank")), colour))
    left.axhline(scaling.alone_s * 1e3, color=INK, linewidth=1, linestyle=":")
    # Below its line, where no step can be, and to the right, where steps take longest.
    left.annotate(
        "computing alone", (sizes[-1], scaling.alone_s * 1e3), (0, -4), textcoords="offset points", fontsize=FONT,
        ha="right", va="top", color=INK,
    )  # fmt: skip
    left.set_ylim(bottom=0)
    right.axhline(100, color=INK, linewidth=1, linestyle=":")
    right.set_ylim(0, 104)
    _name_lines(right, ends)
    figure.text(
        0.07, 0.95, f"{scaling.name}, simulated, {scaling.origin} costs", fontsize=FONT + 2, va="top", color=INK
    )
    return save_figure(figure, path)


def _name_lines(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write the name of each line at its right end, moved apart where lines end close to each other."""
    least = 8.0  # a line of text, in percent of the axis
    at = 104.0
    for share, name, colour in sorted(ends, reverse=True):
        at = min(share, at - least)
        axes.annotate(
            f"{name}: {share:.0f}%", (1.0, share), (1.06, at), xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"), fontsize=FONT, va="center", color=colour, fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
