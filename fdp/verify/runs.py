"""Which bytes a tensor with gaps touches, as runs of bytes without gaps: exact, however large the tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Runs = list[tuple[int, int]]
"""Where runs of bytes begin and end, in order; none touches the next."""

_MOST = 4096
"""Of more runs than that a tensor is looked at element by element, or as a whole."""


def runs_of(tensor: Any) -> Runs | None:
    """The bytes of a tensor.

    Args:
        tensor: has `start` (in bytes), `shape`, `stride` (in elements) and `dtype`.

    Returns:
        The runs; None if there are too many, or if a size is not known.
    """
    if not all(type(number) is int for number in (*tensor.shape, *tensor.stride)):
        return None
    size = tensor.dtype.itemsize
    length, outer = size, []
    for number, step in sorted(zip(tensor.shape, tensor.stride, strict=True), key=lambda pair: pair[1]):
        if number == 1 or step == 0:
            continue
        if step < 0:
            return None
        if step * size <= length:  # it goes on where it ends, or before
            length = (number - 1) * step * size + length
        else:
            outer.append((number, step * size))
    starts = [tensor.start]
    for number, step in outer:
        if len(starts) * number > _MOST:
            return None
        starts = [start + step * index for index in range(number) for start in starts]
    return joined([(start, start + length) for start in starts])


def joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """Runs in order, and those that touch as one."""
    found: Runs = []
    for low, high in sorted(runs):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        elif low < high:
            found.append((low, high))
    return found


def both(one: Runs, two: Runs) -> Runs:
    """The bytes that are in both."""
    found: Runs = []
    first = second = 0
    while first < len(one) and second < len(two):
        low, high = max(one[first][0], two[second][0]), min(one[first][1], two[second][1])
        if low < high:
            found.append((low, high))
        if one[first][1] < two[second][1]:
            first += 1
        else:
            second += 1
    return found


def without(one: Runs, two: Runs) -> Runs:
    """The bytes of the first that are not in the second."""
    found: Runs = []
    for low, high in one:
        for begin, end in two:
            if end <= low:
                continue
            if begin >= high:
                break
            if begin > low:
                found.append((low, begin))
            low = max(low, end)
            if low >= high:
                break
        if low < high:
            found.append((low, high))
    return found
