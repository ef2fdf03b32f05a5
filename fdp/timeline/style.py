"""The style of all pictures: colours, ink, font, figures, and how a file is written."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from fdp.errors import ArgumentError, build_message
from fdp.tables import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (Color Universal Design, 2008), distinct for every common colour blindness, without its
# black. Neighbouring buckets differ in lightness, too.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
BUCKET_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW)
LIGHT, MIDDLE, DARK = "#DEDEDE", "#B4B4B4", "#8C8C8C"
"""Greys, for what is no bucket."""

INK, ALARM, GRID = "#262626", "#A50F15", "#E5E5E5"
WIDTH_IN, FONT = 10.0, 9.0
PIXELS = 1500
"""The width of a picture."""

_MOST_MARKS = 6
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
    return Figure(figsize=(width_in, height_in), dpi=PIXELS / width_in)


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


def colour_of(bucket: int | None) -> str:
    """The colour of a bucket, for its message and for the update that waits for it."""
    return DARK if bucket is None else BUCKET_COLOURS[bucket % len(BUCKET_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour (by the relative luminance of WCAG 2)."""
    linear = [(int(colour[k : k + 2], 16) / 255) ** 2.2 for k in (1, 3, 5)]
    return INK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.25 else "white"


def mark_bytes(axes: Any, most: int) -> None:
    """Mark an axis from 0 to so many bytes with sizes that are easy to read: powers of two, and their multiples."""
    step = 1
    while most // step >= _MOST_MARKS:
        step *= 2
    marks = range(0, most + 1, step)
    axes.set_yticks(list(marks), [format_bytes(mark).replace(".0 ", " ") for mark in marks], fontsize=FONT)


def open_frame(axes: Any, *sides: str) -> None:
    """Leave out sides of the frame around a picture, by default top and right."""
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)
