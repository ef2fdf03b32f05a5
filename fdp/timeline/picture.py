"""Draw timelines: two lanes, buckets in colours, exposed time hatched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fdp.tables import count, format_bytes
from fdp.timeline.rows import Bar, bars_of, parts_without, rows, shared_s, used, waits
from fdp.timeline.style import (
    ALARM,
    FONT,
    INK,
    LIGHT,
    MIDDLE,
    PIXELS,
    WIDTH_IN,
    check_path,
    colour_of,
    ink_on,
    new_figure,
    open_frame,
    save_figure,
)
from fdp.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FACES = {"forward": LIGHT, "backward": MIDDLE}
_LANE_IN, _SMALL_FONT = 0.5, 7.0
_NARROW_HIGH = 0.3
"""The row above the compute lane, for what waits are too narrow for."""

_HIGH = 2.25 + _NARROW_HIGH
_MARGINS_IN = {"left": 0.95, "right": 0.8, "top": 0.75, "bottom": 0.5}
_COMPUTE_Y, _MESSAGES_Y = 1.25, 0.0
_MOST_ROWS = 8
_MOST_LINKS = 24


def draw(timeline: Timeline, path: str | os.PathLike[str] | None, beside: Timeline | None) -> Figure:
    """Draw one timeline, or two over each other on one axis of time; see `Timeline.draw`."""
    check_path(path)
    shown = [timeline] if beside is None else [timeline, beside]
    height = len(shown) * (_HIGH * _LANE_IN + _MARGINS_IN["top"]) + _MARGINS_IN["bottom"]
    figure = new_figure(WIDTH_IN, height)
    end_s = max(each.step_s for each in shown) * 1.005 or 1.0
    width = 1 - (_MARGINS_IN["left"] + _MARGINS_IN["right"]) / WIDTH_IN
    for index, each in enumerate(shown):
        top = height - index * (_HIGH * _LANE_IN + _MARGINS_IN["top"]) - _MARGINS_IN["top"]
        bottom = (top - _HIGH * _LANE_IN) / height
        axes = figure.add_axes((_MARGINS_IN["left"] / WIDTH_IN, bottom, width, _HIGH * _LANE_IN / height))
        _Panel(axes, each, end_s, width * WIDTH_IN).draw(last=index == len(shown) - 1)
    return save_figure(figure, path)


class _Panel:
    """One timeline on one pair of axes.

    Args:
        axes: of matplotlib.
        timeline: to draw.
        end_s: the end of the axis of time.
        width_in: of the axes.
    """

    def __init__(self, axes: Any, timeline: Timeline, end_s: float, width_in: float) -> None:
        self._axes, self._timeline, self._end_s = axes, timeline, end_s
        self._second_in = width_in / end_s
        self._pixel_s = end_s / (PIXELS * width_in / WIDTH_IN)
        self._waits = waits(timeline)

    def draw(self, last: bool) -> None:
        """Draw everything; the last panel has the numbers of the axis of time."""
        axes, timeline = self._axes, self._timeline
        axes.set_xlim(0, self._end_s * 1e3)
        axes.set_ylim(-0.05, _HIGH)
        axes.set_yticks([_COMPUTE_Y + 0.5, _MESSAGES_Y + 0.5], ["compute", "messages"], fontsize=FONT + 1)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=FONT, labelbottom=last)
        open_frame(axes, "top", "right", "left")
        if last:
            axes.set_xlabel("ms since the step began", fontsize=FONT)
        exposed = timeline.exposed_s
        share = f" ({exposed / timeline.step_s:.0%})" if timeline.step_s else ""
        hidden = f"{_ms(exposed)} of it exposed{share}" if self._waits else "all hidden"
        hidden = hidden if timeline.messages else "nothing is sent"
        where = f"{timeline.name} on {count(timeline.world_size, 'rank')}, {timeline.origin}"
        title = f"{where}: {_ms(timeline.step_s)} a step, {hidden}"
        axes.set_title(title, loc="left", fontsize=FONT + 2, pad=21, color=INK)
        self._compute()
        self._messages()
        self._phases()
        axes.axvline(timeline.step_s * 1e3, color=INK, linewidth=1.5, clip_on=False)
        ends = (timeline.step_s + 0.06 / self._second_in) * 1e3
        axes.text(ends, _HIGH / 2, f"end\n{_ms(timeline.step_s)}", fontsize=FONT, va="center", color=INK)

    def _compute(self) -> None:
        intervals = self._timeline.compute
        # Filling a bucket takes little time, and would cut what it interrupts to ribbons: the bar goes on behind it,
        # and the bucket is a foot in front.
        flow, kind = [], "backward"
        for i in intervals:
            kind = kind if i.kind == "pack" else i.kind
            flow.append(i if i.kind == "optimizer" else dataclasses.replace(i, kind=kind, bucket=None))
        bars = [b for b in bars_of(flow, self._pixel_s) if b.kind in _FACES]
        self._bars(bars, _COMPUTE_Y, 1.0, lambda b: _FACES[b.kind])
        packs = [b for b in bars_of(intervals, self._pixel_s) if b.kind == "pack"]
        self._bars(packs, _COMPUTE_Y, 0.3, lambda b: colour_of(b.bucket), 2.0, set_apart=False)
        updates = [b for b in bars_of(intervals, self._pixel_s) if b.kind == "optimizer"]
        self._bars(updates, _COMPUTE_Y, 1.0, lambda b: colour_of(b.bucket))
        for bar in updates:
            if bar.bucket is not None:
                self._label(bar, _COMPUTE_Y + 0.5, (f"bucket {bar.bucket}", str(bar.bucket)))
        self._hatch()

    def _hatch(self) -> None:
        """Where the rank waits, and for how long."""
        if not self._waits:
            return
        spans = [(b.start_s * 1e3, b.seconds * 1e3) for b in self._waits]
        bars = self._axes.broken_barh(spans, (_COMPUTE_Y, 1.0), facecolors="white", edgecolors=ALARM)
        bars.set(hatch="////", linewidth=0.6)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        style = {"fontsize": FONT, "ha": "center", "color": ALARM, "fontweight": "bold"}
        narrow = []
        for bar in self._waits:
            length = _ms(bar.seconds)
            for text in (f"exposed {length}", length, length.replace(" ", "\n")):
                if self._width_s(max(text.split("\n"), key=len)) * 1.15 < bar.seconds:
                    middle = (bar.start_s + bar.end_s) / 2 * 1e3
                    self._axes.text(middle, _COMPUTE_Y + 0.5, text, va="center", bbox=white, **style)
                    break
            else:
                narrow.append(bar)
        self._label_narrow(narrow, style)

    def _label_narrow(self, bars: Sequence[Bar], style: dict[str, Any]) -> None:
        """Write how long waits are that are too narrow for it: in the row above, the longest first."""
        taken: list[tuple[float, float]] = []
        for bar in sorted(bars, key=lambda bar: -bar.seconds):
            text = _ms(bar.seconds)
            half = self._width_s(text) * 1.1 / 2
            middle = min(max((bar.start_s + bar.end_s) / 2, half), self._end_s - half)
            if all(middle + half <= begins or middle - half >= ends for begins, ends in taken):
                taken.append((middle - half, middle + half))
                self._axes.text(middle * 1e3, _COMPUTE_Y + 1.04, text, va="bottom", **style)

    def _messages(self) -> None:
        messages = self._timeline.messages
        rows_of = rows(messages, _MOST_ROWS)
        high = 1.0 / (max(rows_of, default=0) + 1)
        bars = [Bar(m.kind, m.bucket, m.start_s, m.end_s) for m in messages]
        for row in range(max(rows_of, default=-1) + 1):
            own = [bar for bar, its in zip(bars, rows_of, strict=True) if its == row]
            self._bars(own, _MESSAGES_Y + 1.0 - (row + 1) * high, high, lambda b: colour_of(b.bucket))
        taken = used(self._timeline)
        for message, bar, row in zip(messages, bars, rows_of, strict=True):
            top = _MESSAGES_Y + 1.0 - row * high
            size = "" if message.size_bytes is None else f", {format_bytes(message.size_bytes)}"
            texts = (f"bucket {bar.bucket}{size}", f"bucket {bar.bucket}", str(bar.bucket))
            if bar.bucket is not None and high * _LANE_IN > FONT / 72:
                self._label(bar, top - high / 2, texts)
            if bar.bucket in taken and len(messages) <= _MOST_LINKS:
                # From the end of the message to what goes on with it.
                line = ([bar.end_s * 1e3, taken[bar.bucket] * 1e3], [top, _COMPUTE_Y])
                self._axes.plot(*line, color=colour_of(bar.bucket), linewidth=1.2, zorder=0.5)

    def _phases(self) -> None:
        """Brackets above the compute lane with the phases and their lengths."""
        working = [i for i in self._timeline.compute if i.kind != "pack"]
        other = [*self._waits, *(b for b in bars_of(self._timeline.compute) if b.kind == "pack")]
        y = _COMPUTE_Y + 1.1 + _NARROW_HIGH
        free_s = 0.0
        for bar in bars_of(working, self._end_s, by_bucket=False):
            for part in parts_without(bar, self._waits):
                if part.seconds > 2 * self._pixel_s:
                    span = ([part.start_s * 1e3, (part.end_s - self._pixel_s) * 1e3], [y, y])
                    self._axes.plot(*span, color=INK, linewidth=1, clip_on=False, solid_capstyle="butt")
            text = f"{bar.kind} {_ms(bar.seconds - shared_s(bar, other))}"
            half = self._width_s(text) / 2
            middle = min(max((bar.start_s + bar.end_s) / 2, half), self._end_s - half)
            # A step with many short phases has room for the names of some.
            if middle - half >= free_s and bar.seconds > self._end_s / 100:
                free_s = middle + half
                self._axes.text(middle * 1e3, y + 0.08, text, fontsize=FONT, ha="center", va="bottom", color=INK)

    def _bars(
        self, parts: Sequence[Bar], y: float, high: float, colour: Any, least: float = 1.0, set_apart: bool = True
    ) -> None:
        """Draw rectangles, at least so many pixels wide; white lines between those that have room for it."""
        for wide in (True, False):
            own = [b for b in parts if (b.seconds > 4 * self._pixel_s) is wide]
            if not own:
                continue
            spans = [(b.start_s * 1e3, max(b.seconds, least * self._pixel_s) * 1e3) for b in own]
            edges = {"edgecolors": "white", "linewidth": 0.8} if wide and set_apart else {"linewidth": 0}
            self._axes.broken_barh(spans, (y, high), facecolors=[colour(b) for b in own], **edges)

    def _label(self, bar: Bar, y: float, texts: Sequence[str]) -> None:
        """Write the longest of some texts that fits onto a bar."""
        for text, font in (*((text, FONT) for text in texts), (texts[-1], _SMALL_FONT)):
            if self._width_s(text, font) < bar.seconds:
                x = (bar.start_s + bar.end_s) / 2 * 1e3
                ink = ink_on(colour_of(bar.bucket))
                self._axes.text(x, y, text, fontsize=font, ha="center", va="center", color=ink, clip_on=True)
                return

    def _width_s(self, text: str, font: float = FONT) -> float:
        """About how long a text is, in seconds of the axis of time."""
        return (len(text) * 0.6 + 0.3) * font / 72 / self._second_in


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms"
