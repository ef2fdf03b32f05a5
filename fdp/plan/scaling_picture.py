"""Draw how a step scales: its time and its efficiency against the number of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fdp.plan.scaling import Scaling
from fdp.timeline.picture import check_path, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _FONT = "#262626", 9.0
_LINES = (
    ("replanned_s", "fdp, planned for each size", "#0072B2", "-", "o"),
    ("planned_s", "fdp, this plan", "#56B4E9", "--", "s"),
    ("ddp_s", "DDP's default", "#D55E00", "-", "^"),
)


def draw_scaling(scaling: Scaling, path: str | os.PathLike[str] | None) -> Figure:
    """Draw both panels; see `Scaling.draw`."""
    check_path(path)
    figure = new_figure(10.0, 3.6)
    sizes = [scale.world_size for scale in scaling.scales]
    left = figure.add_axes((0.07, 0.14, 0.29, 0.68))
    right = figure.add_axes((0.45, 0.14, 0.29, 0.68))
    for axes, what in ((left, "ms a step"), (right, "efficiency: share of a rank's work alone, %")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes if len(sizes) <= 6 else sizes[:: -(-len(sizes) // 6)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("ranks", fontsize=_FONT)
        axes.set_title(what, loc="left", fontsize=_FONT + 1, color=_INK)
        axes.tick_params(labelsize=_FONT)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    ends: list[tuple[float, str, str]] = []
    for attribute, name, colour, dash, mark in _LINES:
        seconds = [getattr(scale, attribute) for scale in scaling.scales]
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4, "linewidth": 1.8}
        left.plot(sizes, [s * 1e3 for s in seconds], **style)
        shares = [scaling.efficiency(s) * 100 for s in seconds]
        right.plot(sizes, shares, **style)
        ends.append((shares[-1], name, colour))
    left.axhline(scaling.alone_s * 1e3, color=_INK, linewidth=1, linestyle=":")
    left.text(sizes[0], scaling.alone_s * 1e3, "computing alone", fontsize=_FONT, va="top", color=_INK)
    left.set_ylim(bottom=0)
    right.axhline(100, color=_INK, linewidth=1, linestyle=":")
    right.set_ylim(0, 104)
    _name_lines(right, ends)
    figure.text(
        0.07, 0.95, f"{scaling.name}, simulated, {scaling.origin} costs", fontsize=_FONT + 2, va="top", color=_INK
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
            textcoords=("axes fraction", "data"), fontsize=_FONT, va="center", color=colour, fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
