"""Which part of the state is compared at which call: all of it within `ROUNDS` calls, about as many bytes at each.

The parts follow from shapes and dtypes alone, and the call from its number. So all ranks take the same part.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 97
"""Calls within which everything is compared.

A prime: a loop may call a step with two or three states in turn. Each of them then still goes through all rounds.
"""

_LEAST_BYTES = 8192
"""Large leaves are cut into slices of at least so many bytes."""

_START_COST_BYTES = 4096
"""Starting on one slice takes as long as reading so many bytes."""

_ALIGNED = 64
"""Slices begin at a multiple of so many elements, so that words of eight bytes are in one slice."""


@dataclass(frozen=True, order=True)
class LeafSlice:
    """A range of the elements of one leaf.

    Attributes:
        leaf: the index of the leaf.
        start: the first element, in the order of the leaf's shape.
        stop: the one behind the last.
    """

    leaf: int
    start: int
    stop: int


Rounds = tuple[tuple[LeafSlice, ...], ...]
"""The slices of each round."""


def share_out(sizes: Sequence[tuple[int, int]]) -> Rounds:
    """Assign leaves to rounds: large ones in slices, small ones together.

    Args:
        sizes: for each leaf its number of elements, and the bytes of one.

    Returns:
        `ROUNDS` rounds. Few slices come again and again, at least one in each round; all rounds are empty if there is
        nothing to compare.

    Example:
        >>> rounds = share_out([(3, 4), (10_000_000, 4)])
        >>> sum(len(slices) for slices in rounds), rounds[0]
        (98, (LeafSlice(leaf=1, start=0, stop=103104),))
    """
    total = sum(numel * itemsize for numel, itemsize in sizes)
    most = max(_LEAST_BYTES, -(-total // ROUNDS))
    slices = []
    for leaf, (numel, itemsize) in enumerate(sizes):
        count = max(1, -(-numel * itemsize // most))
        step = -(-numel // (count * _ALIGNED)) * _ALIGNED
        slices += [LeafSlice(leaf, start, min(start + step, numel)) for start in range(0, numel, step or 1)]

    def cost(part: LeafSlice) -> int:
        return _START_COST_BYTES + (part.stop - part.start) * sizes[part.leaf][1]

    # The largest first, each to the round with the least: no round gets much more than another one.
    least = [(0, at) for at in range(ROUNDS)]
    rounds: list[list[LeafSlice]] = [[] for _ in range(ROUNDS)]
    for part in sorted(slices, key=lambda part: (-cost(part), part)):
        taken, at = least[0]
        rounds[at].append(part)
        heapq.heapreplace(least, (taken + cost(part), at))
    full = [tuple(each) for each in rounds if each]
    return tuple(full[at % len(full)] if full else () for at in range(ROUNDS))


def last_compared(rounds: Rounds, call: int, since: int) -> dict[LeafSlice, int]:
    """When each slice was compared last before a call.

    Args:
        rounds: the slices of each round.
        call: the call.
        since: the first call at which anything was compared.

    Returns:
        For each slice that was compared before, the number of the call.
    """
    found: dict[LeafSlice, int] = {}
    for before in range(max(since, call - ROUNDS), call):
        found.update(dict.fromkeys(rounds[before % ROUNDS], before))
    return found
