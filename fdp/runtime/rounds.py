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
"""Large leaves are cut into slices of no fewer bytes."""

_LOOK_BYTES = 4096
"""To begin with a piece takes as long as to read so many bytes."""

_ALIGNED = 64
"""Slices begin at a multiple of so many elements, so that words of eight bytes are in one slice."""


@dataclass(frozen=True, order=True)
class Piece:
    """Some elements of a leaf.

    Attributes:
        leaf: the index of the leaf.
        start: the first element, in the order of the leaf's shape.
        stop: the one behind the last.
    """

    leaf: int
    start: int
    stop: int


Rounds = tuple[tuple[Piece, ...], ...]
"""The pieces of each round."""


def share_out(sizes: Sequence[tuple[int, int]]) -> Rounds:
    """Share leaves out to rounds: large ones in slices, small ones together.

    Args:
        sizes: for each leaf its number of elements, and the bytes of one.

    Returns:
        `ROUNDS` rounds. Few pieces come again and again, at least one in each round; all are empty if there is nothing.

    Example:
        >>> rounds = share_out([(3, 4), (10_000_000, 4)])
        >>> sum(len(pieces) for pieces in rounds), rounds[0]
        (98, (Piece(leaf=1, start=0, stop=103104),))
    """
    total = sum(numel * itemsize for numel, itemsize in sizes)
    most = max(_LEAST_BYTES, -(-total // ROUNDS))
    pieces = []
    for leaf, (numel, itemsize) in enumerate(sizes):
        slices = max(1, -(-numel * itemsize // most))
        step = -(-numel // (slices * _ALIGNED)) * _ALIGNED
        pieces += [Piece(leaf, start, min(start + step, numel)) for start in range(0, numel, step or 1)]

    def cost(piece: Piece) -> int:
        return _LOOK_BYTES + (piece.stop - piece.start) * sizes[piece.leaf][1]

    # The largest first, each to the round with the least: no round gets much more than another one.
    least = [(0, at) for at in range(ROUNDS)]
    rounds: list[list[Piece]] = [[] for _ in range(ROUNDS)]
    for piece in sorted(pieces, key=lambda piece: (-cost(piece), piece)):
        taken, at = least[0]
        rounds[at].append(piece)
        heapq.heapreplace(least, (taken + cost(piece), at))
    full = [tuple(each) for each in rounds if each]
    return tuple(full[at % len(full)] if full else () for at in range(ROUNDS))


def last_compared(rounds: Rounds, call: int, since: int) -> dict[Piece, int]:
    """When each piece was compared last before a call.

    Args:
        rounds: the pieces of each round.
        call: the call.
        since: the first call at which anything was compared.

    Returns:
        For each piece that was compared before, the number of the call.
    """
    found: dict[Piece, int] = {}
    for before in range(max(since, call - ROUNDS), call):
        found.update(dict.fromkeys(rounds[before % ROUNDS], before))
    return found
