"""Draw what a step holds in memory against its time, kind upon kind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fdp.emit.memory.peak import DeviceMemory, MemoryForecast
from fdp.tables import format_bytes
from fdp.timeline.style import (
    DARK,
    FONT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    WIDTH_IN,
    check_path,
    mark_bytes,
    new_figure,
    open_frame,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOP_IN, _HIGH_IN, _BOTTOM_IN = 0.55, 2.9, 0.55
_LEFT, _RIGHT = 0.09, 0.73
_KINDS = (
    ("state", DARK),
    ("batch", RED),
    ("gathered", SKY),
    ("buckets", ORANGE),
    ("computed values", GREEN),
    ("elsewhere", PURPLE),
)


def draw_forecast(forecast: MemoryForecast, path: str | os.PathLike[str] | None) -> Figure:
    """Draw a panel for each device; see `MemoryForecast.draw`."""
    check_path(path)
    panel_in = _TOP_IN + _HIGH_IN + _BOTTOM_IN
    height_in = panel_in * max(len(forecast.devices), 1)
    figure = new_figure(WIDTH_IN, height_in)
    for index, device in enumerate(reversed(forecast.devices)):
        bottom = (index * panel_in + _BOTTOM_IN) / height_in
        axes = figure.add_axes((_LEFT, bottom, _RIGHT - _LEFT, _HIGH_IN / height_in))
        _draw_device(axes, forecast, device)
    return save_figure(figure, path)


def _draw_device(axes: Any, forecast: MemoryForecast, device: DeviceMemory) -> None:
    moments = device.over_time
    bands = [
        [device.state_bytes] * len(moments),
        [device.batch_bytes] * len(moments),
        [each.gathered_bytes for each in moments],
        [each.buckets_bytes for each in moments],
        [each.values_bytes for each in moments],
        [each.other_bytes for each in moments],
    ]
    times = [float(at) for at in range(len(moments) + 1)]
    below = [0] * len(moments)
    shown = []
    for (name, colour), band in zip(_KINDS, bands, strict=True):
        above = [under + size for under, size in zip(below, band, strict=True)]
        if any(band):
            axes.fill_between(times, [*below, below[-1]], [*above, above[-1]], step="post", color=colour, linewidth=0)
            shown.append((name, colour, max(band)))
        below = above
    held = device.peak_bytes
    axes.axhline(held, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(len(moments), 1))
    axes.set_ylim(0, held * 1.08 or 1)
    mark_bytes(axes, held)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.set_xlabel("instruction of the program", fontsize=FONT)
    _mark_backward(axes, device)
    title = f"{forecast.name}, memory of a rank of {forecast.world_size} on {device.device}: {format_bytes(held)}"
    axes.set_title(title, loc="left", fontsize=FONT + 1, color=INK, pad=16)
    open_frame(axes)
    _name_bands(axes, shown, held)


def _mark_backward(axes: Any, device: DeviceMemory) -> None:
    """Mark the backward passes above the picture."""
    at = [index for index, each in enumerate(device.over_time) if each.backward]
    if not at:
        return
    first, last, end = at[0], at[-1] + 1, len(device.over_time)
    for name, begin, until in (("forward", 0, first), ("backward", first, last), ("update", last, end)):
        if until - begin > 0.09 * end:
            axes.text(
                (begin + until) / 2, 1.01, name, ha="center", va="bottom", fontsize=FONT, color=INK,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    for line in (first, last):
        axes.axvline(line, color=INK, linewidth=0.8, linestyle=":")


def _name_bands(axes: Any, shown: list[tuple[str, str, int]], held: int) -> None:
    """Label each colour at the right, with its largest size, in the order of the bands."""
    lines = [(f"held: {format_bytes(held)} (dashed)", INK)]
    lines += [(f"{name}: up to {format_bytes(most)}", colour) for name, colour, most in reversed(shown)]
    for index, (text, colour) in enumerate(lines):
        height = 0.97 - 0.09 * index
        if index:
            axes.plot(
                [1.025], [height], marker="s", markersize=7, color=colour, clip_on=False, transform=axes.transAxes
            )
        axes.text(1.05, height, text, fontsize=FONT, va="center", color=INK, transform=axes.transAxes)
