"""Printed tables, read again."""

from __future__ import annotations


def table_rows(text: str) -> list[list[str]]:
    """The cells below the heading of a printed table; what was folded into several lines is one cell again."""
    rows: list[list[str]] = []
    for line in text.split("-+-")[-1].splitlines()[1:]:
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    return rows
