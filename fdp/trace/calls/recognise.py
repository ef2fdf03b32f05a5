"""Recognise a call that has the signature of an earlier one, without computing its signature.

A signature asks every leaf for shape, strides, memory and more, and hashes the answers. A training loop makes the same
call again and again: whether a call is like one that is remembered is found out far faster, by comparison in C++ and
by addresses. State that comes back from the step lies where it lay, and one look at its addresses is enough to know
that it still shares no memory.

What is found is that the program of the earlier call serves this one as well: the signatures are equal, or differ in
what no program can tell.

Nothing here keeps a tensor alive, and nothing takes an object for itself by its `id`: an object may have been given
other memory or another shape since (`x.data = y`, `x.t_()`), and an `id` may have been given to another object.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from fdp.pytorch.guards import tensors_like
from fdp.pytorch.tensors import storage_id
from fdp.trace.calls.arguments import Flat, describe_leaf, describe_static, sharing_pattern
from fdp.trace.calls.overlap import overlap
from fdp.trace.calls.structure import Structure
from fdp.trace.trace import Trace

T = TypeVar("T")

MOST = 8
"""The number of calls that are remembered. If more signatures take turns, each call computes its signature in full."""

_FEW = 32
"""Up to so many passing tensors are compared with each other in less time than it takes to check the staying ones."""

_address = torch.Tensor.data_ptr
_offset = torch.Tensor.storage_offset


class RememberedCall(Generic[T]):
    """What is remembered of one call, to recognise a later call like it.

    Its tensors are of two kinds. Staying ones are returned by the step in the same memory, so that the next call most
    often has them at the same addresses. All others are passing ones.
    """

    def __init__(self, place: object, flat: Flat, structure: Structure, trace: Trace, value: T) -> None:
        self.place, self.structure, self.value = place, structure, value
        self._static = describe_static(flat.static)
        self._static_hash = hash(self._static)
        leaves = flat.leaves
        at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [(i, describe_leaf(x)) for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)]
        self._tensors = _picker(at, len(leaves))
        tensors = [leaves[index] for index in at]
        position_of = {index: position for position, index in enumerate(at)}
        self._history = [
            (position_of[i], leaves[i].grad_fn is not None)
            for i in flat.donated
            if i in position_of and leaves[i].requires_grad
        ]
        self._shared = flat.shared
        # An empty tensor lies nowhere, and may be a part of any memory.
        self._any_empty = any(tensor.numel() == 0 for tensor in tensors)
        sharing = {position for pair in flat.shared or () for position in pair}
        free = flat.shared is not None and not self._any_empty
        stay = [position for position in _returned_in_place(trace) if position not in sharing] if free else []
        pass_by = sorted(set(range(len(tensors))) - set(stay))
        self._staying, self._passing = _picker(stay, len(tensors)), _picker(pass_by, len(tensors))
        self._staying_like = tensors_like(self._staying(tensors))
        self._passing_like = tensors_like(self._passing(tensors))
        self._staying_offsets = _Offsets(self._staying(tensors), True)
        self._passing_offsets = _Offsets(self._passing(tensors), trace.depends_on_storage_offsets)
        self._staying_sizes = list(map(_extent_bytes, self._staying(tensors)))
        self._last = _Addresses(list(map(_address, self._staying(tensors))), self._staying_sizes)
        self._pieces = _Pieces(self._passing(tensors) + self._staying(tensors), flat.shared or ())
        self._passing_pieces = _Pieces(self._passing(tensors), flat.shared or ())

    def recognise(self, leaves: list[Any], static: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The tensors among leaves of the same structure, if this call's program certainly serves them; else None."""
        for index, described in self._constants:
            if describe_leaf(leaves[index]) != described:
                return None
        if (static or self._static) and not self._has_equal(static):
            return None
        tensors = self._tensors(leaves)
        passing, staying = self._passing(tensors), self._staying(tensors)
        if not (self._passing_like(passing) and self._staying_like(staying) and self._passing_offsets.match(passing)):
            return None
        for position, history in self._history:
            if (tensors[position].grad_fn is not None) != history:
                return None
        return tensors if self._shared is None or self._share_memory_as_before(tensors, passing, staying) else None

    def _has_equal(self, static: tuple[Any, ...]) -> bool:
        described = describe_static(static)
        try:
            # Of the same hash as well: an object that equals itself may have changed inside.
            return hash(described) == self._static_hash and described == self._static
        except TypeError:
            return False  # what cannot be hashed is refused later on

    def _share_memory_as_before(
        self, tensors: list[torch.Tensor], passing: list[torch.Tensor], staying: list[torch.Tensor]
    ) -> bool:
        """Whether the same tensors share memory as in the earlier call, and offsets are the same where they matter."""
        assert self._shared is not None
        if self._any_empty:
            return sharing_pattern(tensors) == self._shared
        bases = self._passing_offsets.bases(passing)
        addresses = list(map(_address, staying))
        last = self._last
        if addresses and addresses == last.addresses and len(passing) <= _FEW:
            # The same bytes in the same shapes. They shared no memory a call ago, so they share none now, and a program
            # can find nothing different about them; their offset is not in it.
            sizes = [tensor.untyped_storage().nbytes() for tensor in passing]
            if not all(map(last.are_apart_from, bases, sizes)):
                return False
            if not self._shared:
                return not overlap(bases, sizes)
            apart = self._passing_pieces.are_apart(bases, list(map(_address, passing))) and self._pairs_share(tensors)
            return apart or sharing_pattern(tensors) == self._shared
        if not self._staying_offsets.match(staying):
            return False
        bases += self._staying_offsets.bases_at(addresses)
        # If those share that did, and no bytes of others lie in one place, the same share. (Storages that touch beyond
        # what the tensors use, or begin in one place, may still be apart, or not.)
        apart = self._pieces.are_apart(bases, list(map(_address, passing)) + addresses)
        if not (apart and self._pairs_share(tensors)):
            return sharing_pattern(tensors) == self._shared
        # As a whole, since another thread may be reading it.
        self._last = _Addresses(addresses, self._staying_sizes)
        return True

    def _pairs_share(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors that had one storage in the earlier call have one now."""
        assert self._shared is not None
        return all(
            storage_id(tensors[one].untyped_storage()) == storage_id(tensors[two].untyped_storage())
            for one, two in self._shared
        )


class _Offsets:
    """The storage offsets of tensors, and whether later calls must have the same."""

    def __init__(self, tensors: Sequence[torch.Tensor], matter: bool) -> None:
        self._matter = matter
        self._elements = list(map(_offset, tensors))
        self._bytes = [o * t.element_size() for o, t in zip(self._elements, tensors, strict=True)]
        self._any = any(self._elements)

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have these offsets, if offsets matter."""
        if not self._matter:
            return True
        return list(map(_offset, tensors)) == self._elements if self._any else not any(map(_offset, tensors))

    def bases(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The address at which the storage of each tensor begins; equal for tensors that share it."""
        if not self._matter and any(map(_offset, tensors)):
            return [tensor.untyped_storage().data_ptr() for tensor in tensors]
        if not self._matter:
            return list(map(_address, tensors))
        return self.bases_at(list(map(_address, tensors)))

    def bases_at(self, addresses: list[int]) -> list[int]:
        """The same, for tensors at these addresses."""
        return list(map(operator.sub, addresses, self._bytes)) if self._any else addresses


class _Addresses:
    """The addresses and sizes of tensors that share no memory."""

    def __init__(self, addresses: list[int], sizes_bytes: list[int]) -> None:
        self.addresses = addresses
        self._sizes_bytes = sizes_bytes

    @functools.cached_property
    def _in_order(self) -> tuple[list[int], list[int]]:
        pieces = sorted(zip(self.addresses, self._sizes_bytes, strict=True))
        return [start for start, _ in pieces], [start + size for start, size in pieces]

    def are_apart_from(self, base: int, size_bytes: int) -> bool:
        """Whether none of them has a byte in a piece of memory."""
        starts, ends = self._in_order
        # They overlap nowhere, so the one that begins last before the end of the piece also ends last.
        before = bisect.bisect_left(starts, base + size_bytes)
        return before == 0 or ends[before - 1] <= base


class _Pieces:
    """The pieces of memory of the tensors of a call; tensors that share memory have one piece.

    Args:
        tensors: in the order in which they are asked about.
        shared: pairs of tensors in the order of the call, of which the second shares the memory of the first.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], shared: Sequence[tuple[int, int]]) -> None:
        self._any_shared = bool(shared)
        self._sizes_bytes = list(map(_extent_bytes, tensors))
        self._count = len(tensors) - len(shared)

    def are_apart(self, bases: Sequence[int], addresses: Sequence[int]) -> bool:
        """Whether there are as many pieces as before, and no two pieces overlap.

        Args:
            bases: where the memory of each tensor begins.
            addresses: where the tensor itself begins.
        """
        if not self._any_shared:
            return len(set(bases)) == self._count and not overlap(addresses, self._sizes_bytes)
        whole: dict[int, tuple[int, int]] = {}
        for base, start, size in zip(bases, addresses, self._sizes_bytes, strict=True):
            first, end = whole.get(base, (start, start))
            whole[base] = min(first, start), max(end, start + size)
        starts = [start for start, _ in whole.values()]
        return len(whole) == self._count and not overlap(starts, [end - start for start, end in whole.values()])


def _extent_bytes(tensor: torch.Tensor) -> int:
    """The number of bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


class RememberedCalls(Generic[T]):
    """The last few calls of different signatures, latest first, each with a value (its program)."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed: threads may read it at any time.
        self._calls: tuple[RememberedCall[T], ...] = ()

    def recognise(
        self, place: object, args: tuple[Any, ...], static: tuple[Any, ...]
    ) -> tuple[T, list[torch.Tensor]] | None:
        """Find the value of a remembered call that certainly has this call's signature.

        Args:
            place: whatever else calls must have in common; compared by equality.
            args: the arguments that are trees.
            static: the other arguments.

        Returns:
            The value, and the tensors of the arguments in a row; None if it takes a closer look.
        """
        structure: Structure | None = None
        leaves: list[Any] | None = None
        for number, call in enumerate(calls := self._calls):
            if call.place != place:
                continue
            if call.structure is not structure:
                structure = call.structure
                leaves = structure.flatten(args)
            if leaves is not None and (tensors := call.recognise(leaves, static)) is not None:
                if number:
                    self._calls = (call, *calls[:number], *calls[number + 1 :])
                return call.value, tensors
        return None

    def remember(
        self, place: object, flat: Flat, trace: Trace, value: T, earlier: RememberedCall[T] | None = None
    ) -> RememberedCall[T]:
        """Remember a call, and forget the oldest one if there are too many.

        Args:
            place: as for `recognise`.
            flat: the arguments.
            trace: the trace that serves it.
            value: what belongs to it.
            earlier: what was returned for an earlier call with this value; it is used again if it fits.

        Returns:
            What is remembered of the call.
        """
        calls = self._calls
        if earlier is None or earlier.recognise(list(flat.leaves), flat.static) is None:
            same = (call.structure for call in calls if call.structure.spec == flat.spec)
            earlier = RememberedCall(place, flat, next(same, None) or Structure(flat.spec), trace, value)
        self._calls = (earlier, *calls[: MOST - 1])
        return earlier


def _returned_in_place(trace: Trace) -> list[int]:
    """The positions of the input tensors that a step returns in the same memory; none if its graph may depend on
    offsets."""
    if trace.depends_on_storage_offsets:
        return []
    return sorted({output.slot for output in trace.outputs if output.slot is not None})


def _picker(indices: Sequence[int], length: int) -> Callable[[list[Any]], list[Any]]:
    """A function that gets the items at some indices (ascending) of a list of that length."""
    if not indices:
        return lambda items: []
    first, count = indices[0], len(indices)
    if count == length:
        return lambda items: items
    if list(indices) == list(range(first, first + count)):  # true of most states, and many times faster
        return operator.itemgetter(slice(first, first + count))
    several = operator.itemgetter(*indices)
    return lambda items: list(several(items))
