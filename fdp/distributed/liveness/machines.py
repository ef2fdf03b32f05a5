"""Which ranks are on which machine, as monitors exchange it: few bytes for many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def packed(hosts: dict[int, str]) -> list[list[Any]]:
    """Ranks by their machine: [machine, first, last, first, last, ...].

    Example:
        >>> packed({0: "a", 1: "a", 2: "b", 3: "b", 5: "a"})
        [['a', 0, 1, 5, 5], ['b', 2, 3]]
    """
    made: dict[str, list[Any]] = {}
    for rank in sorted(hosts):
        row = made.setdefault(hosts[rank], [hosts[rank]])
        if len(row) > 1 and row[-1] == rank - 1:
            row[-1] = rank
        else:
            row += [rank, rank]
    return list(made.values())


def unpacked(rows: object, size: int) -> dict[int, str]:
    """The argument of `packed`."""
    return {rank: str(host) for host, ends in _rows(rows) for first, last in ends for rank in _range(first, last, size)}


def _rows(rows: Any) -> Iterator[tuple[Any, Iterable[tuple[Any, Any]]]]:
    for host, *ends in rows:
        yield host, zip(ends[::2], ends[1::2], strict=True)


def _range(first: Any, last: Any, size: int) -> range:
    if not 0 <= int(first) <= int(last) < size:
        raise ValueError("no ranks of this group")
    return range(int(first), int(last) + 1)
