"""Draws what overlap.py measured: step time against the bucket cap, measured and predicted, and what "auto" made of it.

    python benchmarks/caps_picture.py FIGURES.json [FIGURES.json ...] PICTURE

FIGURES.json is what `overlap.py --json` wrote; each case of each setting gets a panel. PICTURE ends in .png, .svg or
.pdf. A point is the median of all rounds, its bar goes from the lower to the upper quartile.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cases import CASES
from contenders import CAPS_MB
from overlap import SETTINGS, Overlap
from step_time import Quartiles, quartiles_of

from fdp.timeline.style import (
    BLUE,
    FONT,
    GREEN,
    GRID,
    INK,
    ORANGE,
    RED,
    SKY,
    WIDTH_IN,
    check_path,
    new_figure,
    open_frame,
    save_figure,
)

_HEIGHT_IN = 3.7
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 0.045, 0.905, 0.82, 0.26, 0.14
_MEASURED = (("ddp", "DDP", RED, "^"), ("fdp", "fdp", BLUE, "o"))
_PREDICTED = ("fdp, predicted", GREEN, "s")
_DEFAULTS = (("ddp", "DDP's default", ORANGE, "--"), ("fdp", "fdp, auto", SKY, "-"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the figures, and writes the picture."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    check_path(given[-1])
    kept = [json.loads(pathlib.Path(path).read_text())["figures"] for path in given[:-1]]
    draw([(setting, case, row) for found in kept for setting, cases in found.items() for case, row in cases.items()],
         given[-1])  # fmt: skip
    return 0


def draw(panels: Sequence[tuple[str, str, Mapping[str, Any]]], path: str) -> None:
    """Draws a panel for each case.

    Args:
        panels: name of a setting, name of a case, and what was measured, as `Overlap.as_json` has it.
        path: of the picture.
    """
    figure = new_figure(WIDTH_IN, _HEIGHT_IN)
    places = list(dict.fromkeys(SETTINGS[setting].title for setting, _, _ in panels))
    width = (_RIGHT - _LEFT - _BETWEEN * (len(panels) - 1)) / len(panels)
    for number, (setting, case, row) in enumerate(panels):
        axes = figure.add_axes((_LEFT + number * (width + _BETWEEN), _BOTTOM, width, _TOP - _BOTTOM))
        _panel(axes, Overlap.of_json(row))
        title = CASES[case].what.partition(",")[0] + (f", {setting}" if len(places) > 1 else "")
        axes.set_title(title, loc="left", fontsize=FONT + 1, color=INK)
    what = f"ms a step, {'; '.join(places)}: medians and quartiles"
    figure.text(_LEFT, 0.97, what, fontsize=FONT + 2, va="top", color=INK)
    handles, names = figure.axes[0].get_legend_handles_labels()
    drawn = dict(zip(names, handles, strict=True))
    order = [*(name for _, name, *_ in _MEASURED), _PREDICTED[0], *(name for _, name, *_ in _DEFAULTS)]
    figure.legend(
        [drawn[name] for name in order], order, loc="lower center", ncols=len(order), fontsize=FONT, frameon=False
    )
    save_figure(figure, path)


def _panel(axes: Any, row: Overlap) -> None:
    """One case: the caps from left to right, the defaults as lines across, each with its median at its end."""
    at, end = range(len(CAPS_MB)), len(CAPS_MB) - 0.6
    for who, name, colour, mark in _MEASURED:
        found = [_quartiles_ms(row, f"{who}-cap-{cap}") for cap in CAPS_MB]
        medians = [middle for _, middle, _ in found]
        spread = [middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]
        axes.errorbar(
            at, medians, spread, color=colour, marker=mark, markersize=5, linewidth=1.6, capsize=3, label=name
        )
    name, colour, mark = _PREDICTED
    predictions = [row.predicted[f"fdp-cap-{cap}"] for cap in CAPS_MB]
    axes.plot(at, [1e3 * each.step_s if each else float("nan") for each in predictions], f"{mark}:", color=colour,
              markersize=5, markerfacecolor="none", linewidth=1.4, label=name)  # fmt: skip
    ends = []
    for who, name, colour, dash in _DEFAULTS:
        low, middle, high = _quartiles_ms(row, who)
        axes.fill_between([-0.4, end], low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot([-0.4, end], [middle, middle], color=colour, linestyle=dash, linewidth=1.6, label=name)
        ends.append((middle, name))
    axes.set_ylim(0, None)
    axes.set_xlim(-0.4, end)
    axes.set_xticks(list(at), [str(cap) for cap in CAPS_MB])
    axes.set_xlabel("bucket cap, MiB", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    open_frame(axes)
    _name_ends(axes, ends, end)


def _name_ends(axes: Any, ends: list[tuple[float, str]], at: float) -> None:
    """Write name and median of both lines across at their right ends, moved apart where those are close."""
    (low, _), (high, _) = sorted(ends)
    apart = max(0.0, 0.15 * axes.get_ylim()[1] - (high - low)) / 2
    for (height, name), moved in zip(sorted(ends), (-apart, apart), strict=True):
        axes.annotate(f"{name}\n{height:.0f} ms", (at, height), (at + 0.12, height + moved), fontsize=FONT - 1,
                      va="center", color=INK, annotation_clip=False, linespacing=1.0)  # fmt: skip


def _quartiles_ms(row: Overlap, name: str) -> Quartiles:
    """Lower quartile, median and upper quartile of the rounds' medians."""
    low, middle, high = quartiles_of(row.seconds(name))
    return 1e3 * low, 1e3 * middle, 1e3 * high


if __name__ == "__main__":
    sys.exit(main())
