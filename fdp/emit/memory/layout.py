"""Buffer reuse: offsets for pieces of memory, such that pieces that are live at the same time do not overlap.

Two algorithms are tried. One walks through time with a free list, which is quick. If that leaves gaps, the other places
the largest pieces first, each in a gap that is free for as long as it lives. What is large (bytes, or bytes times
instructions) and which gap is taken (the smallest that fits, or the first) is tried in four ways; the smallest block
wins.

References: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference (2020), section 5.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

ALIGNMENT_BYTES = 64
"""As torch's own allocator aligns memory: kernels load whole cache lines, and their results can depend on it."""

_MANY_PIECES, _MOST_PIECES = 1024, 4096
"""With more pieces the second algorithm is tried once, or not at all: it compares all pairs, and takes seconds then."""


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
    ways = _WAYS if len(pieces) <= _MANY_PIECES else _WAYS[:1] if len(pieces) <= _MOST_PIECES else ()
    smallest = found
    for largeness, gap in ways:
        if smallest.size_bytes == found.needed_bytes:
            break
        other = _largest_first(found, heads, largeness, gap)
        smallest = min(smallest, other, key=lambda layout: layout.size_bytes)
    return smallest


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


def _largest_first(
    found: Layout,
    heads: Mapping[Hashable, Hashable],
    largeness: Callable[[int, int], int],
    gap: Callable[[Sequence[tuple[int, int]], int], int],
) -> Layout:
    """Place the largest pieces first. Pieces that took over a place in the first layout do so here, too.

    Args:
        found: the first layout.
        heads: for each piece the first one of the chain whose place it took over there.
        largeness: of a size and a number of instructions.
        gap: the offset for a piece, of what is taken while it lives, and its size.
    """
    chains: defaultdict[Hashable, list[Lifetime]] = defaultdict(list)
    for piece in found.pieces:
        chains[heads[piece.key]].append(piece)
    lives = {head: (min(each.first for each in c), max(each.last for each in c)) for head, c in chains.items()}
    placed: list[tuple[int, int, int, int]] = []  # (begin, end, first, last), by where they begin
    offsets: dict[Hashable, int] = {}
    sizes = {head: round_up(chain[0].size_bytes) for head, chain in chains.items()}

    def order(head: Hashable) -> tuple[int, tuple[int, int]]:
        first, last = lives[head]
        return -largeness(sizes[head], last + 1 - first), lives[head]

    for head in sorted(chains, key=order):
        size, (first, last) = sizes[head], lives[head]
        offset = gap([(b, e) for b, e, f, at in placed if f <= last and first <= at], size)
        bisect.insort(placed, (offset, offset + size, first, last))
        offsets.update((piece.key, offset) for piece in chains[head])
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


def _first_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The offset for a piece of some size: in the first gap that fits, else behind everything."""
    end = 0
    for begin, until in taken:
        if begin - end >= size:
            break
        end = max(end, until)
    return end


def _area(size: int, instructions: int) -> int:
    return size * instructions


def _size(size: int, instructions: int) -> int:
    return size


_WAYS = tuple(itertools.product((_area, _size), (_first_gap, _best_gap)))
"""Ways to place the largest pieces first: what is large, and which gap is taken."""


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
