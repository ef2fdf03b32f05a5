"""Draw timelines: two lanes, buckets in colours, exposed time hatched."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fdp.errors import ArgumentError, build_message
from fdp.tables import count, format_bytes
from fdp.timeline.rows import Bar, bars_of, rows, shared_s, used, waits
from fdp.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (Color Universal Design, 2008), distinct for every common colour blindness, without its
# black. Neighbouring buckets differ in lightness, too.
BUCKET_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_FACES = {"forward": "#DEDEDE", "backward": "#B4B4B4"}
_OTHER, _ALARM, _INK = "#8C8C8C", "#A50F15", "#262626"
_WIDTH_IN, _LANE_IN, _FONT = 10.0, 0.5, 9.0
_HIGH = 2.25
_MARGINS_IN = {"left": 0.95, "right": 0.8, "top": 0.75, "bottom": 0.5}
_COMPUTE_Y, _MESSAGES_Y = 1.25, 0.0
_PIXELS = 1500
_MOST_ROWS = 8
_MOST_LINKS = 24
_SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width_in: float, height_in: float) -> Figure:
    """Make an empty figure outside of matplotlib's windows and global state.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            build_message(
                "a picture was asked for, and matplotlib is not installed.",
                remedy="pip install matplotlib; print() and save_trace() need neither.",
            )
        ) from error
    return Figure(figsize=(width_in, height_in), dpi=_PIXELS / width_in)


def check_path(path: str | os.PathLike[str] | None) -> None:
    """Refuse a file name whose suffix names no kind of picture, before anything is drawn.

    Raises:
        ArgumentError: it is neither .png, .svg nor .pdf.
    """
    if path is not None and pathlib.Path(path).suffix.lower() not in _SUFFIXES:
        raise ArgumentError(
            build_message(
                f"no kind of picture is known for {os.fspath(path)!r}.",
                remedy=f"give the file one of the suffixes {', '.join(_SUFFIXES)}.",
            )
        )


def save_figure(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Write a figure, the same bytes each time, and return it."""
    if path is not None:
        from matplotlib import rc_context

        suffix = pathlib.Path(path).suffix.lower()
        # Without dates and random names a picture that did not change is no change to a repository.
        dated = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        with rc_context({"svg.hashsalt": "fdp", "svg.fonttype": "none"}):
            figure.savefig(path, metadata=dated[suffix])
    return figure


def draw(timeline: Timeline, path: str | os.PathLike[str] | None, beside: Timeline | None) -> Figure:
    """Draw one timeline, or two over each other on one axis of time; see `Timeline.draw`."""
    check_path(path)
    shown = [timeline] if beside is None else [timeline, beside]
    height = len(shown) * (_HIGH * _LANE_IN + _MARGINS_IN["top"]) + _MARGINS_IN["bottom"]
    figure = new_figure(_WIDTH_IN, height)
    end_s = max(each.step_s for each in shown) * 1.005 or 1.0
    width = 1 - (_MARGINS_IN["left"] + _MARGINS_IN["right"]) / _WIDTH_IN
    for index, each in enumerate(shown):
        top = height - index * (_HIGH * _LANE_IN + _MARGINS_IN["top"]) - _MARGINS_IN["top"]
        bottom = (top - _HIGH * _LANE_IN) / height
        axes = figure.add_axes((_MARGINS_IN["left"] / _WIDTH_IN, bottom, width, _HIGH * _LANE_IN / height))
        _Panel(axes, each, end_s, width * _WIDTH_IN).draw(last=index == len(shown) - 1)
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
        self._pixel_s = end_s / (_PIXELS * width_in / _WIDTH_IN)
        self._waits = waits(timeline)

    def draw(self, last: bool) -> None:
        """Draw everything; the last panel has the numbers of the axis of time."""
        axes, timeline = self._axes, self._timeline
        axes.set_xlim(0, self._end_s * 1e3)
        axes.set_ylim(-0.05, _HIGH)
        axes.set_yticks([_COMPUTE_Y + 0.5, _MESSAGES_Y + 0.5], ["compute", "messages"], fontsize=_FONT + 1)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=_FONT, labelbottom=last)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        if last:
            axes.set_xlabel("ms since the step began", fontsize=_FONT)
        exposed = timeline.exposed_s
        share = f" ({exposed / timeline.step_s:.0%})" if timeline.step_s else ""
        hidden = f"{_ms(exposed)} of it exposed{share}" if self._waits else "all hidden"
        hidden = hidden if timeline.messages else "nothing is sent"
        where = f"{timeline.name} on {count(timeline.world_size, 'rank')}, {timeline.origin}"
        title = f"{where}: {_ms(timeline.step_s)} a step, {hidden}"
        axes.set_title(title, loc="left", fontsize=_FONT + 2, pad=21, color=_INK)
        self._compute()
        self._messages()
        self._phases()
        axes.axvline(timeline.step_s * 1e3, color=_INK, linewidth=1.5, clip_on=False)
        ends = (timeline.step_s + 0.06 / self._second_in) * 1e3
        axes.text(ends, _HIGH / 2, f"end\n{_ms(timeline.step_s)}", fontsize=_FONT, va="center", color=_INK)

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
        bars = self._axes.broken_barh(spans, (_COMPUTE_Y, 1.0), facecolors="white", edgecolors=_ALARM)
        bars.set(hatch="////", linewidth=0.6)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        style = {"fontsize": _FONT, "ha": "center", "color": _ALARM, "fontweight": "bold"}
        for bar in self._waits:
            for text in (f"exposed {_ms(bar.seconds)}", _ms(bar.seconds)):
                if self._width_s(text) * 1.15 < bar.seconds:
                    middle = (bar.start_s + bar.end_s) / 2 * 1e3
                    self._axes.text(middle, _COMPUTE_Y + 0.5, text, va="center", bbox=white, **style)
                    break

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
            if bar.bucket is not None and high * _LANE_IN > _FONT / 72:
                self._label(bar, top - high / 2, texts)
            if bar.bucket in taken and len(messages) <= _MOST_LINKS:
                # From the end of the message to what goes on with it.
                line = ([bar.end_s * 1e3, taken[bar.bucket] * 1e3], [top, _COMPUTE_Y])
                self._axes.plot(*line, color=colour_of(bar.bucket), linewidth=1.2, zorder=0.5)

    def _phases(self) -> None:
        """Brackets above the compute lane with the phases and their lengths."""
        working = [i for i in self._timeline.compute if i.kind != "pack"]
        other = [*self._waits, *(b for b in bars_of(self._timeline.compute) if b.kind == "pack")]
        y = _COMPUTE_Y + 1.1
        free_s = 0.0
        for bar in bars_of(working, self._end_s, by_bucket=False):
            if bar.seconds > 2 * self._pixel_s:
                span = ([bar.start_s * 1e3, (bar.end_s - self._pixel_s) * 1e3], [y, y])
                self._axes.plot(*span, color=_INK, linewidth=1, clip_on=False, solid_capstyle="butt")
            text = f"{bar.kind} {_ms(bar.seconds - shared_s(bar, other))}"
            half = self._width_s(text) / 2
            middle = min(max((bar.start_s + bar.end_s) / 2, half), self._end_s - half)
            # A step with many short phases has room for the names of some.
            if middle - half >= free_s and bar.seconds > self._end_s / 100:
                free_s = middle + half
                self._axes.text(middle * 1e3, y + 0.08, text, fontsize=_FONT, ha="center", va="bottom", color=_INK)

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
        for text in texts:
            if self._width_s(text) < bar.seconds:
                x = (bar.start_s + bar.end_s) / 2 * 1e3
                ink = ink_on(colour_of(bar.bucket))
                self._axes.text(x, y, text, fontsize=_FONT, ha="center", va="center", color=ink, clip_on=True)
                return

    def _width_s(self, text: str) -> float:
        """About how long a text is, in seconds of the axis of time."""
        return (len(text) + 1) * 0.55 * _FONT / 72 / self._second_in


def colour_of(bucket: int | None) -> str:
    """The colour of a bucket, for its message and for the update that waits for it."""
    return _OTHER if bucket is None else BUCKET_COLOURS[bucket % len(BUCKET_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour (by the relative luminance of WCAG 2)."""
    linear = [(int(colour[k : k + 2], 16) / 255) ** 2.2 for k in (1, 3, 5)]
    return _INK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.25 else "white"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms"
