"""Buffer reuse: offsets for pieces of memory, such that pieces that are live at the same time do not overlap.

Two algorithms are tried. One walks through time with a free list, which is quick. If that leaves large gaps, the other
places the largest pieces first, each in the smallest gap that fits.

References: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference (2020), section 5.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

ALIGNMENT_BYTES = 64
"""As torch's own allocator aligns memory: kernels load whole cache lines, and their results can depend on it."""

_GAPS = 1.02
"""The second algorithm is tried if the block is so many times larger than what is live at once."""

_MOST_PIECES = 4096
"""With more pieces the second algorithm would take seconds: it compares all pairs."""


@dataclass(frozen=True)
class Lifetime:
    """A piece of memory from its first use to its last.

    Attributes:
        key: names it.
        size_bytes: its size.
        first: position of the first use.
        last: position of the last use.
        may_reuse: pieces whose place it may take at `first`, if that is their last use.
    """

    key: Hashable
    size_bytes: int
    first: int
    last: int
    may_reuse: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Offsets in one block of memory.

    Attributes:
        offsets: where each piece begins, in bytes.
        size_bytes: of the block.
        needed_bytes: the most that is in use at once; no layout is smaller.
        pieces: what was placed.
    """

    offsets: Mapping[Hashable, int]
    size_bytes: int
    needed_bytes: int
    pieces: tuple[Lifetime, ...] = ()


def lay_out(pieces: Sequence[Lifetime]) -> Layout:
    """Place pieces of memory so that no two that are live at the same time overlap.

    Args:
        pieces: with their lifetimes, each at least one position long; both ends count.

    Returns:
        The layout.

    Example:
        >>> dict(lay_out([Lifetime("a", 64, 0, 1), Lifetime("b", 64, 1, 2), Lifetime("c", 64, 2, 3)]).offsets)
        {'a': 0, 'b': 64, 'c': 0}
    """
    found, heads = _in_order(pieces)
    if found.size_bytes <= _GAPS * found.needed_bytes or len(pieces) > _MOST_PIECES:
        return found
    other = _largest_first(found, heads)
    return other if other.size_bytes < found.size_bytes else found


def _in_order(pieces: Sequence[Lifetime]) -> tuple[Layout, Mapping[Hashable, Hashable]]:
    """Place each piece at its first use; also return, for each, the first piece of the chain whose place it took
    over."""
    beginning: defaultdict[int, list[Lifetime]] = defaultdict(list)
    ending: defaultdict[int, list[Hashable]] = defaultdict(list)
    for piece in pieces:
        beginning[piece.first].append(piece)
        ending[piece.last].append(piece.key)
    sizes = {piece.key: round_up(piece.size_bytes) for piece in pieces}
    last = {piece.key: piece.last for piece in pieces}
    block = _Block()
    offsets: dict[Hashable, int] = {}
    inherited: set[Hashable] = set()
    heads: dict[Hashable, Hashable] = {}
    live = needed = 0
    for position in sorted({*beginning, *ending}):
        for piece in sorted(beginning[position], key=lambda piece: -piece.size_bytes):
            size = sizes[piece.key]
            parent = next(
                (
                    key
                    for key in piece.may_reuse
                    if last.get(key) == position and sizes[key] == size and key in offsets and key not in inherited
                ),
                None,
            )
            if parent is None:
                offsets[piece.key] = block.take(size)
                live += size
                needed = max(needed, live)
                heads[piece.key] = piece.key
            else:
                inherited.add(parent)
                heads[piece.key] = heads[parent]
                offsets[piece.key] = offsets[parent]
        for key in ending[position]:
            if key not in inherited:
                block.give_back(offsets[key], sizes[key])
                live -= sizes[key]
    return Layout(MappingProxyType(offsets), block.size, needed, tuple(pieces)), heads


def _largest_first(found: Layout, heads: Mapping[Hashable, Hashable]) -> Layout:
    """Place the largest pieces first. Pieces that took over a place in the first layout do so here, too."""
    chains: defaultdict[Hashable, list[Lifetime]] = defaultdict(list)
    for piece in found.pieces:
        chains[heads[piece.key]].append(piece)
    lives = {head: (min(each.first for each in c), max(each.last for each in c)) for head, c in chains.items()}
    placed: list[tuple[int, int, int, int]] = []  # (begin, end, first, last), by where they begin
    offsets: dict[Hashable, int] = {}
    for head, chain in sorted(chains.items(), key=lambda item: (-item[1][0].size_bytes, lives[item[0]])):
        size, (first, last) = round_up(chain[0].size_bytes), lives[head]
        offset = _best_gap([(b, e) for b, e, f, at in placed if f <= last and first <= at], size)
        bisect.insort(placed, (offset, offset + size, first, last))
        offsets.update((piece.key, offset) for piece in chain)
    size_bytes = max((end for _, end, _, _ in placed), default=0)
    return Layout(MappingProxyType(offsets), size_bytes, found.needed_bytes, found.pieces)


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The offset for a piece of some size: in the smallest gap that fits, else behind everything."""
    end, best = 0, None
    for begin, until in taken:
        room = begin - end
        if room >= size and (best is None or room < best[0]):
            best = room, end
        end = max(end, until)
    return end if best is None else best[1]


class _Block:
    """A block of memory that grows at its end, with the gaps in it."""

    def __init__(self) -> None:
        self.size = 0
        self._gaps: list[tuple[int, int]] = []  # (offset, size), sorted, never touching each other

    def take(self, size: int) -> int:
        fitting = [gap for gap in self._gaps if gap[1] >= size]
        if fitting:
            # The smallest gap that fits keeps large gaps whole.
            offset, room = min(fitting, key=lambda gap: (gap[1], gap[0]))
            at = bisect.bisect_left(self._gaps, (offset, room))
            self._gaps[at : at + 1] = [(offset + size, room - size)] if room > size else []
            return offset
        offset = self.size
        if self._gaps and sum(self._gaps[-1]) == self.size:
            offset, _ = self._gaps.pop()  # the end is free: grow by what is missing
        self.size = offset + size
        return offset

    def give_back(self, offset: int, size: int) -> None:
        at = bisect.bisect_left(self._gaps, (offset, size))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            before = self._gaps.pop(at - 1)
            offset, size, at = before[0], before[1] + size, at - 1
        self._gaps.insert(at, (offset, size))


def round_up(size_bytes: int) -> int:
    """A size rounded up to the alignment of pieces."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
