"""Draw pieces of memory, address against time: each is a rectangle, buckets in colours."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fdp.tables import format_bytes
from fdp.timeline.picture import BUCKET_COLOURS, check_path, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUE, LIGHT = "#B4B4B4", "#DEDEDE"
"""The colours of values, and of values that are drawn lighter."""

_INK, _FONT = "#262626", 9.0
_TOP_IN, _HEIGHT_IN, _BOTTOM_IN = 0.4, 2.9, 0.55


class Drawn(Protocol):
    """What is drawn of a piece of memory; see `fdp.runtime.memory_map.Piece`."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def offset_bytes(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...

    @property
    def bucket(self) -> int | None: ...


def draw_map(
    name: str,
    what: str,
    size_bytes: Sequence[tuple[str, int]],
    needed_bytes: Sequence[tuple[str, int]],
    pieces: Sequence[Drawn],
    path: str | os.PathLike[str] | None,
    light: Collection[object] = (),
) -> Figure:
    """Draw a panel for each device.

    Args:
        name: of the step.
        what: is drawn of it.
        size_bytes: device and size of each block.
        needed_bytes: device, and the most that is in use there at once.
        pieces: what lies there.
        path: the file to write; None writes nothing.
        light: those of the pieces that lie in memory which nothing lay in before; they are drawn in a lighter grey.

    Returns:
        The figure, of matplotlib.

    Raises:
        ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
    """
    check_path(path)
    blocks = [(device, size) for device, size in size_bytes if size] or [("", 0)]
    height = _TOP_IN + _HEIGHT_IN + _BOTTOM_IN
    figure = new_figure(10.0, height * len(blocks))
    end = max((piece.last + 1 for piece in pieces), default=0)
    for index, (device, size) in enumerate(reversed(blocks)):
        bottom = (index * height + _BOTTOM_IN) / (height * len(blocks))
        axes = figure.add_axes((0.09, bottom, 0.88, _HEIGHT_IN / (height * len(blocks))))
        for piece in pieces:
            if piece.device == device:
                shade = LIGHT if piece in light else VALUE
                face = shade if piece.bucket is None else BUCKET_COLOURS[piece.bucket % len(BUCKET_COLOURS)]
                _draw_piece(axes, piece, face, size or 1, end)
        _set_axes(axes, size or 1, end, "; dark grey: in memory that others are done with" if light else "")
        needed = format_bytes(dict(needed_bytes).get(device, 0))
        title = f"{name}, {what} on {device}: {format_bytes(size)}, of which {needed} are in use at once"
        axes.set_title(title, loc="left", fontsize=_FONT + 1, color=_INK)
    return save_figure(figure, path)


def _draw_piece(axes: Any, piece: Drawn, face: str, size: int, end: int) -> None:
    from matplotlib.patches import Rectangle

    width, high = piece.last + 1 - piece.first, piece.size_bytes / size
    corner = (piece.first, piece.offset_bytes / size)
    axes.add_patch(Rectangle(corner, width, high, facecolor=face, edgecolor="white", linewidth=0.4))
    if high > 0.06 and width > 0.07 * end:
        middle = (piece.first + width / 2, piece.offset_bytes / size + high / 2)
        label = piece.name if len(piece.name) * 0.011 < width / end else ""
        axes.text(*middle, label, ha="center", va="center", fontsize=_FONT - 2, color=_INK, clip_on=True)


def _set_axes(axes: Any, size: int, end: int, greys: str) -> None:
    axes.set_xlim(0, max(end, 1))
    axes.set_ylim(0, 1)
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    axes.set_yticks(marks, [format_bytes(mark * size) for mark in marks], fontsize=_FONT)
    axes.tick_params(axis="x", labelsize=_FONT)
    axes.set_xlabel(f"instruction of the program{greys}", fontsize=_FONT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
