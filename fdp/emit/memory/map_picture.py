"""Draw pieces of memory, address against time: each is a rectangle, buckets in colours."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fdp.tables import format_bytes
from fdp.timeline.style import (
    FONT,
    INK,
    LIGHT,
    MIDDLE,
    WIDTH_IN,
    check_path,
    colour_of,
    ink_on,
    mark_bytes,
    new_figure,
    open_frame,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    figure = new_figure(WIDTH_IN, height * len(blocks))
    end = max((piece.last + 1 for piece in pieces), default=0)
    for index, (device, size) in enumerate(reversed(blocks)):
        bottom = (index * height + _BOTTOM_IN) / (height * len(blocks))
        axes = figure.add_axes((0.09, bottom, 0.88, _HEIGHT_IN / (height * len(blocks))))
        for piece in pieces:
            if piece.device == device:
                shade = LIGHT if piece in light else MIDDLE
                face = shade if piece.bucket is None else colour_of(piece.bucket)
                _draw_piece(axes, piece, face, size or 1, end)
        _set_axes(axes, size or 1, end, "; dark grey: memory that another value had before" if light else "")
        needed = dict(needed_bytes).get(device, 0)
        use = "all of it in use at once" if needed == size else f"of which {format_bytes(needed)} are in use at once"
        title = f"{name}, {what} on {device}: {format_bytes(size)}, {use}"
        axes.set_title(title, loc="left", fontsize=FONT + 1, color=INK)
    return save_figure(figure, path)


def _draw_piece(axes: Any, piece: Drawn, face: str, size: int, end: int) -> None:
    from matplotlib.patches import Rectangle

    width, high = piece.last + 1 - piece.first, piece.size_bytes
    corner = (piece.first, piece.offset_bytes)
    axes.add_patch(Rectangle(corner, width, high, facecolor=face, edgecolor="white", linewidth=0.4))
    if high > 0.06 * size and width > 0.07 * end:
        middle = (piece.first + width / 2, piece.offset_bytes + high / 2)
        label = piece.name if len(piece.name) * 0.011 < width / end else ""
        axes.text(*middle, label, ha="center", va="center", fontsize=FONT - 2, color=ink_on(face), clip_on=True)


def _set_axes(axes: Any, size: int, end: int, greys: str) -> None:
    axes.set_xlim(0, max(end, 1))
    axes.set_ylim(0, size)
    mark_bytes(axes, size)
    axes.set_ylabel("address", fontsize=FONT)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.set_xlabel(f"instruction of the program; colours: buckets, grey: other values{greys}", fontsize=FONT)
    open_frame(axes)
