"""Draws what overlap.py measured: step time against the bucket cap, measured and predicted, and what "auto" made of it.

    python benchmarks/caps_picture.py FIGURES.json [FIGURES.json ...] PICTURE.png

FIGURES.json is what `overlap.py --json` wrote; each case of each setting gets a panel.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders import CAPS_MB

_DDP, _FDP = "#d55e00", "#0072b2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the figures, and writes the picture."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    kept = [json.loads(pathlib.Path(path).read_text())["figures"] for path in given[:-1]]
    panels = [
        (setting, case, row) for figures in kept for setting, cases in figures.items() for case, row in cases.items()
    ]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (setting, case, row) in zip(axes[0], panels, strict=True):
        _panel(axis, f"{case}, {setting}", row)
    figure.tight_layout()
    figure.savefig(given[-1], dpi=110, metadata={"Software": None})
    return 0


def _panel(axis: Any, title: str, row: Mapping[str, Any]) -> None:
    at = range(len(CAPS_MB))

    def measured(name: str) -> float:
        return 1e3 * statistics.median(statistics.median(turn) for turn in row["times"][name]["host_s"])

    ours, theirs = [[measured(f"{who}-cap-{cap}") for cap in CAPS_MB] for who in ("fdp", "ddp")]
    predicted = [1e3 * row["predicted"][f"fdp-cap-{cap}"]["step_s"] for cap in CAPS_MB]
    axis.plot(at, theirs, "^-", color=_DDP)
    axis.plot(at, ours, "o-", color=_FDP)
    axis.plot(at, predicted, "o:", color=_FDP, fillstyle="none")
    auto, default = measured("fdp"), measured("ddp")
    across = [-0.3, len(CAPS_MB) - 0.95]
    axis.plot(across, [auto, auto], color=_FDP, linewidth=1)
    axis.plot(across, [default, default], color=_DDP, linewidth=1, linestyle="--")
    axis.set_xticks(list(at), [str(cap) for cap in CAPS_MB])
    axis.set_xlim(-0.3, len(CAPS_MB) + 0.9)
    axis.set_ylim(0, 1.2 * max(*theirs, *ours, default))
    axis.set_xlabel("bucket cap, MiB")
    axis.set_title(title + ": ms a step", loc="left", fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    labels = [
        (theirs[-1], "DDP", _DDP), (ours[-1], "fdp", _FDP), (predicted[-1], "fdp, predicted", _FDP),
        (auto, f"fdp auto {auto:.0f}", _FDP), (default, f"DDP's default {default:.0f}", _DDP),
    ]  # fmt: skip
    # Labels stand beside the ends of their lines, as far apart as they need.
    last = None
    for height, text, colour in sorted(labels):
        room = axis.get_ylim()[1] * 0.06
        place = height if last is None else max(height, last + room)
        axis.annotate(text, (len(CAPS_MB) - 0.85, place), color=colour, fontsize=8, va="center")
        last = place


if __name__ == "__main__":
    sys.exit(main())
