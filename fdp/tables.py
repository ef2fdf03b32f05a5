"""Plain tables for the terminal, for logs and for `print()`: the same text wherever there is no terminal."""

from __future__ import annotations

import html
import io
import shutil
import sys
import textwrap
from typing import Any

import rich.box
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
        table = rich.table.Table(box=rich.box.ASCII2, show_edge=False, pad_edge=True)
        for index, column in enumerate(self._columns):
            numeric = bool(self._rows) and all(isinstance(row[index], (int, float)) for row in self._rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in self._rows:
            table.add_row(*(rich.text.Text(str(cell)) for cell in row))
        out = io.StringIO()
        rich.console.Console(file=out, width=_width(), color_system=None, legacy_windows=False).print(table)
        body = "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
        return f"{heading(self._title)}\n{body}"


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
