"""Plain tables for the terminal, for logs and for `print()`: the same text wherever there is no terminal."""

from __future__ import annotations

import dataclasses
import html
import io
import shutil
import sys
import textwrap
from typing import Any, Literal

# Here, and not where something is printed: Rich draws from Python's random numbers when it is imported, and a call of a
# step must not draw from them.
import rich.box
import rich.cells
import rich.console
import rich.table
import rich.text

_WIDTH = 160
"""Where there is no terminal: in files, in documents and in pipes."""


class Printed:
    """A value that prints as text of several lines; in a notebook it is shown as that text."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Table:
    """A titled table that turns into text with `str()`.

    Where all columns do not fit beside each other, they follow each other in several parts, and the first column stands
    in each. A word is broken only if it alone is wider than the terminal.

    Args:
        title: one line above the table.
        columns: the headings; a column whose cells are all numbers is set flush right.

    Example:
        >>> table = Table("sizes", ("name", "bytes"))
        >>> table.add("w", 12)
        >>> print(table)
        sizes
         name | bytes
        ------+-------
         w    |    12
    """

    def __init__(self, title: str, columns: tuple[str, ...]) -> None:
        self._title, self._columns, self._rows = title, columns, list[tuple[Any, ...]]()

    def add(self, *cells: Any) -> None:
        """Add a row, one cell a column."""
        self._rows.append(cells)

    def __str__(self) -> str:
        width = _width()
        cells = [[name, *(str(row[at]) for row in self._rows)] for at, name in enumerate(self._columns)]
        words = _word_widths(cells, width)
        parts = "\n\n".join(self._part(columns, cells, words, width) for columns in _side_by_side(words, width))
        return f"{heading(self._title)}\n{parts}"

    def _part(self, columns: list[int], cells: list[list[str]], words: list[int], width: int) -> str:
        table = rich.table.Table(box=rich.box.ASCII2, show_edge=False, pad_edge=True)
        whole = [max(map(rich.cells.cell_len, cells[at])) for at in columns]
        for at, cell_width in zip(columns, _widened([words[at] for at in columns], whole, width), strict=True):
            numeric = bool(self._rows) and all(isinstance(row[at], (int, float)) for row in self._rows)
            justify: Literal["right", "left"] = "right" if numeric else "left"
            table.add_column(self._columns[at], justify=justify, overflow="fold", width=cell_width)
        for row in range(len(self._rows)):
            table.add_row(*(rich.text.Text(cells[at][row + 1]) for at in columns))
        out = io.StringIO()
        rich.console.Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


_BETWEEN = 3
"""Cells between the text of one column and that of the next."""


def _word_widths(cells: list[list[str]], width: int) -> list[int]:
    """The longest word of each column: of the first one as much as leaves room for any other beside it."""
    words = [max(rich.cells.cell_len(word) for text in texts for word in [*text.split(), ""]) for texts in cells]
    longest = max(words[1:], default=0)
    words[0] = min(words[0], max(width + 1 - _BETWEEN - (longest + _BETWEEN if longest else 0), width // 3))
    return [words[0], *(min(each, width + 1 - words[0] - 2 * _BETWEEN) for each in words[1:])]


def _widened(words: list[int], whole: list[int], width: int) -> list[int]:
    """The widths of columns: none broader than is needed for all to fit, and none narrower than its longest word."""
    for most in range(max(whole), 0, -1):
        widths = [max(word, min(cell, most)) for word, cell in zip(words, whole, strict=True)]
        if sum(each + _BETWEEN for each in widths) - 1 <= width:
            return widths
    return words


def _side_by_side(words: list[int], width: int) -> list[list[int]]:
    """Which columns stand beside each other, so that no word is broken: in as few parts as can be, of like widths."""
    parts = _filled(words, width)
    for narrower in range(width - 1, 0, -1):
        found = _filled(words, narrower)
        if len(found) > len(parts):
            break
        parts = found
    return parts


def _filled(words: list[int], width: int) -> list[list[int]]:
    parts = [[0]]  # the first column stands in each
    for at in range(1, len(words)):
        if sum(words[column] + _BETWEEN for column in [*parts[-1], at]) - 1 > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(at)
    return parts


def heading(text: str) -> str:
    """Break lines where the terminal ends; what goes on is indented. Elsewhere lines stay as they are.

    Example:
        >>> heading("one line")
        'one line'
    """
    if not _to_a_terminal():
        return text
    wrapped = (textwrap.wrap(line, _width(), subsequent_indent="  ") or [""] for line in text.splitlines())
    return "\n".join(part for parts in wrapped for part in parts)


def _to_a_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _width() -> int:
    """The width of the terminal that a table is printed to, if it is printed to one."""
    return max(shutil.get_terminal_size().columns, 40) if _to_a_terminal() else _WIDTH


def count(number: int, noun: str) -> str:
    """Write a number with its noun.

    Example:
        >>> count(1, "rank"), count(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def cut_short(text: str, cells: int = 40) -> str:
    """Cut a text that is to be part of one line.

    Example:
        >>> cut_short("encoder.layers.11.attention", 12)
        'encoder.lay…'
    """
    line = rich.text.Text(" ".join(text.split()))
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def short_name(step: str) -> str:
    """The name of a step, cut so that the rest of a line fits into 80 columns.

    Example:
        >>> short_name("train_step")
        'train_step'
    """
    return cut_short(step, 24)


def of_fields(value: Any) -> str:
    """What a frozen dataclass is made of, without the fields that have their defaults.

    Args:
        value: an instance.

    Returns:
        The call that makes an equal one.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Size:
        ...     rows: int
        ...     columns: int = 1
        >>> of_fields(Size(3))
        'Size(rows=3)'
    """
    fields = ((field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value))
    given = [f"{name}={held!r}" for name, held, default in fields if held is not default and held != default]
    return f"{type(value).__name__}({', '.join(given)})"


def ms(seconds: float) -> str:
    """Write seconds as milliseconds, to the microsecond.

    Example:
        >>> ms(0.0123456)
        '12.346'
    """
    return f"{seconds * 1e3:.3f}"


def format_bytes(size_bytes: float) -> str:
    """Write a number of bytes as a person reads it.

    Example:
        >>> format_bytes(1_572_864)
        '1.5 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")
