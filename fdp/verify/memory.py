"""Memory whose bytes hold terms: the value of a tensor follows from the last writes to its bytes, and from its
geometry.

A block of memory is cut into cells, intervals of bytes. A write of a dense tensor replaces the cells that it covers. A
write of one with gaps lies over what was there, as a layer. A read sees, for each byte, the newest write to it: if that
is one write under the same geometry, the value is what was written; otherwise it is a term of its own, made of the
pieces that it reads and of its geometry, relative to where the tensor begins. So a value does not depend on its place.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import torch

from fdp.verify.extents import UNBOUNDED, extent_of, general_extent
from fdp.verify.failure import VerificationError
from fdp.verify.terms import Term, Terms
from fdp.verify.visible_writes import visible_writes


class Block:
    """A piece of memory.

    Attributes:
        kind: "arena", "input", "closed", "constant" or "fresh".
        name: what it is called in messages.
        starts: where its cells begin, in bytes, in order.
        ends: where they end.
        layers: what they hold, newest first.
        writes: how often it has been written.
        initial: how often of that before anything ran.
    """

    __slots__ = ("ends", "initial", "kind", "layers", "name", "starts", "writes")

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name = kind, name
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.layers: list[tuple[Store, ...]] = []
        self.writes = self.initial = 0

    def copied(self) -> Block:
        """Another block that holds the same."""
        made = Block(self.kind, self.name)
        made.starts, made.ends, made.layers = list(self.starts), list(self.ends), list(self.layers)
        return made


class View(NamedTuple):
    """A tensor: bytes of a block under a geometry.

    Attributes:
        block: the memory.
        start: its first byte.
        shape: its shape.
        stride: its strides, in elements.
        dtype: its dtype.
        span: bytes from its first to behind its last.
        numel: its elements, -1 if that is not known.
        dense: whether it has no gaps.
        marks: "conj", "neg", both, or none: it stands for the conjugate or the negative of what its memory holds.
    """

    block: Block
    start: int
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    span: int
    numel: int
    dense: bool
    marks: tuple[str, ...] = ()

    def overlaps(self, other: View) -> bool:
        """Whether bytes from its first to its last are also among those of another."""
        return (
            self.block is other.block
            and self.start < other.start + other.span
            and other.start < self.start + self.span
            and self.numel != 0 != other.numel
        )

    def lies_like(self, other: View) -> bool:
        """Whether both are the same elements in the same order."""
        return (self.start, self.shape, self.stride, self.dtype) == (
            other.start,
            other.shape,
            other.stride,
            other.dtype,
        )

    def transposed(self) -> View:
        """The same elements with the dimensions in the opposite order."""
        return self._replace(shape=self.shape[::-1], stride=self.stride[::-1])


def view_of(block: Block, offset: Any, shape: Any, stride: Any, dtype: torch.dtype, marks: Any = ()) -> View:
    """The view of a tensor, from its own shape, strides and offset (in elements)."""
    try:
        extent = extent_of(shape, stride)
    except TypeError:
        extent = general_extent(shape, stride)
    size = dtype.itemsize
    start = offset * size if type(offset) is int else 0
    span = extent.span * size if extent.span < UNBOUNDED else UNBOUNDED
    return View(block, start, extent.shape, extent.stride, dtype, span, extent.numel, extent.dense, marks)


def marks_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Whether a tensor is a lazy conjugate or a lazy negative."""
    conj, neg = tensor.is_conj(), tensor.is_neg()
    return () if not conj and not neg else ("conj",) * conj + ("neg",) * neg


class Store(NamedTuple):
    """One write to memory."""

    term: Term
    start: int
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype


IN_FLIGHT: tuple[Store, ...] = (Store(Term(("in flight",), (), None, False), 0, (), (), torch.uint8),)
"""What a bucket holds while its message is under way."""


class Memory:
    """Reads and writes.

    Args:
        terms: where terms come from.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def write(self, view: View, term: Term) -> None:
        """Let a tensor hold a value."""
        if view.numel == 0:
            return
        if view.marks:
            for mark in view.marks:
                term = self.marked(mark, term)
        block, start = view.block, view.start
        block.writes += 1
        store = Store(term, start, view.shape, view.stride, view.dtype)
        if view.dense and term.key[:4] == ("load", view.shape, view.stride, view.dtype):
            self._copy_cells(block, start, view.span, term.key[4])
        elif view.dense:
            self._replace(block, start, start + view.span, (store,))
        else:
            self._lay_over(block, start, start + view.span, store)

    def _copy_cells(self, block: Block, start: int, span: int, pieces: tuple[Any, ...]) -> None:
        """Copy the cells, so that a read with the first shape sees the first value."""
        for low, high, layers in pieces:
            end = start + (high or span)
            copied = tuple(Store(term, start + at, *geometry) for term, at, *geometry in layers)
            self._replace(block, start + low, end, copied or None)

    def give_up(self, block: Block, start: int, size: int) -> None:
        """Make bytes undefined."""
        self._replace(block, start, start + size, None)

    def take_off(self, block: Block, start: int, size: int) -> None:
        """Mark bytes as those of a message that is under way."""
        if size:
            self._replace(block, start, start + size, IN_FLIGHT)

    def land(self, block: Block, start: int, size: int) -> None:
        """Note that a message has arrived: its bytes may be touched again, and are still undefined."""
        at = bisect.bisect_left(block.starts, start)
        while at < len(block.starts) and block.starts[at] < start + size:
            del block.starts[at], block.ends[at], block.layers[at]

    def read(self, view: View) -> Term:
        """The value of a tensor."""
        if view.numel == 0:
            return self.terms.make(("empty", view.shape, view.dtype), view.shape, view.dtype)
        block, start = view.block, view.start
        at = bisect.bisect_right(block.starts, start) - 1
        if at >= 0 and block.ends[at] >= start + view.span:
            top = block.layers[at][0]
            if top[1] == start and top[2] == view.shape and top[3] == view.stride and top[4] == view.dtype:
                if block.layers[at] is IN_FLIGHT:
                    raise _in_flight("read", block)
                term = top[0]
                if view.marks:
                    for mark in view.marks:
                        term = self.marked(mark, term)
                return term
        term = self._load(view, max(at, 0))
        for mark in view.marks:
            term = self.marked(mark, term)
        return term

    def marked(self, mark: str, term: Term) -> Term:
        """The conjugate or the negative of a value."""
        if term.key[0] == mark:  # twice is not at all
            inner: Term = term.key[1]
            return inner
        return self.terms.make((mark, term), term.shape, term.dtype)

    def _load(self, view: View, at: int) -> Term:
        start, end = view.start, view.start + view.span
        pieces = _pieces(view.block, start, end, at)
        if any(layers is IN_FLIGHT for _, _, layers in pieces):
            raise _in_flight("read", view.block)
        if (len(pieces) > 1 and not view.dense) or not all(_is_one(layers) for _, _, layers in pieces):
            only = pieces[0][2] if len(pieces) == 1 else None
            if only is None or len(only) != 1 or not _is_exactly(only[0], view):
                pieces = visible_writes(view, pieces, _NOTHING)
        found: list[tuple[int, int, tuple[Any, ...]]] = []
        for low, high, layers in pieces:
            if layers is None:
                found.append((low - start, high - start, ()))
                continue
            if len(pieces) == 1 and len(layers) == 1 and _is_exactly(layers[0], view):
                return layers[0].term
            inside = tuple(
                s if s[0] is UNDEFINED else (s.term, s.start - start, s.shape, s.stride, s.dtype) for s in layers
            )
            whole = len(pieces) == 1
            found.append((0 if whole else low - start, 0 if whole else high - start, inside))
        key = ("load", view.shape, view.stride, view.dtype, tuple(found))
        return self.terms.make(key, view.shape, view.dtype)

    def _replace(self, block: Block, start: int, end: int, layers: tuple[Store, ...] | None) -> None:
        starts, ends = block.starts, block.ends
        at = bisect.bisect_right(starts, start) - 1
        if at >= 0 and starts[at] == start and ends[at] == end and layers is not None:
            if block.layers[at] is IN_FLIGHT:
                raise _in_flight("written", block)
            block.layers[at] = layers
            return
        first = at + 1
        new: list[tuple[int, int, tuple[Store, ...]]] = []
        if at >= 0 and ends[at] > start:
            if starts[at] < start:
                new.append((starts[at], start, block.layers[at]))
            first = at
        last = first
        while last < len(starts) and starts[last] < end:
            if block.layers[last] is IN_FLIGHT:
                raise _in_flight("written", block)
            last += 1
        if layers is not None:
            new.append((start, end, layers))
        if last > first and ends[last - 1] > end:
            new.append((end, ends[last - 1], block.layers[last - 1]))
        starts[first:last] = [cell[0] for cell in new]
        ends[first:last] = [cell[1] for cell in new]
        block.layers[first:last] = [cell[2] for cell in new]

    def _lay_over(self, block: Block, start: int, end: int, store: Store) -> None:
        at = max(bisect.bisect_right(block.starts, start) - 1, 0)
        for low, high, layers in _pieces(block, start, end, at):
            if layers is IN_FLIGHT:
                raise _in_flight("written", block)
            older = tuple(s for s in layers or () if s[1:] != store[1:])
            self._replace(block, low, high, (store, *older))


def _is_exactly(store: Store, view: View) -> bool:
    return (store.start, store.shape, store.stride, store.dtype) == (view.start, view.shape, view.stride, view.dtype)


def _is_one(layers: tuple[Store, ...] | None) -> bool:
    """Whether each byte is one of a single write."""
    return layers is None or (len(layers) == 1 and general_extent(layers[0].shape, layers[0].stride).dense)


def _pieces(block: Block, start: int, end: int, at: int) -> list[tuple[int, int, tuple[Store, ...] | None]]:
    """The content of bytes, in order; None for nothing. Equal neighbours are one piece."""
    found: list[tuple[int, int, tuple[Store, ...] | None]] = []
    position = start
    while position < end:
        if at >= len(block.starts):
            found.append((position, end, None))
            break
        if block.ends[at] <= position:
            at += 1
            continue
        low, high = max(block.starts[at], position), min(block.ends[at], end)
        if low >= end:
            found.append((position, end, None))
            break
        if low > position:
            found.append((position, low, None))
        layers = block.layers[at]
        if found and found[-1][1] == low and found[-1][2] == layers:
            found[-1] = (found[-1][0], high, layers)
        else:
            found.append((low, high, layers))
        position, at = high, at + 1
    return found


UNDEFINED = Term(("undefined",), (), None, False)
"""The content of uninitialised memory, at any place."""
_NOTHING = Store(UNDEFINED, 0, (), (), torch.uint8)


def _in_flight(what: str, block: Block) -> VerificationError:
    return VerificationError(f"memory of a bucket whose message is under way is {what} ({block.name})")
