"""Recognise a call that is like an earlier one without working its signature out.

A signature asks every leaf for shape, strides, memory and more, and hashes the answers. A training loop makes the same
call again and again: whether a call is like one that is remembered is found out far faster, by comparison in C++ and
by addresses. State that comes back from the step lies where it lay, and one look at its addresses is enough to know
that it still shares no memory.

Nothing here keeps a tensor alive, and nothing takes an object for itself by its `id`: an object may have been given
other memory or another shape since (`x.data = y`, `x.t_()`), and an `id` may have been given to another object.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from fdp.trace.arguments import Flat, describe_leaf, describe_static, sharing_pattern
from fdp.trace.guards import tensors_like
from fdp.trace.structure import Structure

T = TypeVar("T")

MOST = 8
"""So many calls are remembered: that many signatures may take turns before a call is worked out in full again."""

_address = torch.Tensor.data_ptr
_offset = torch.Tensor.storage_offset


class _Call(Generic[T]):
    """One call, as far as it can be recognised again."""

    def __init__(self, place: Any, flat: Flat, structure: Structure, kept: Sequence[int], value: T) -> None:
        self.place, self.structure, self.value = place, structure, value
        self._static = describe_static(flat.static)
        self._static_hash = hash(self._static)
        leaves = flat.leaves
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [(i, describe_leaf(leaf)) for i, leaf in enumerate(leaves) if i not in set(tensors)]
        self._pick = None if len(tensors) == len(leaves) else _picker(tensors)
        found = [leaves[index] for index in tensors]
        # The guard refuses an object that comes twice; it is passed once, and must come twice again.
        first: dict[int, int] = {}
        self._twice = [(i, first[id(t)]) for i, t in enumerate(found) if first.setdefault(id(t), i) != i]
        once = sorted(first.values(), reverse=True)
        # Backwards, because what changes most often is the batch, and it comes last.
        self._pick_once = operator.itemgetter(slice(None, None, -1)) if not self._twice else _picker(once)
        self._like = tensors_like([found[index] for index in once])
        self._offsets = [tensor.storage_offset() for tensor in found]
        self._offset_any = any(self._offsets)
        place_of = {index: position for position, index in enumerate(tensors)}
        self._with_history = [
            (place_of[i], leaves[i].grad_fn is not None)
            for i in flat.donated
            if i in place_of and leaves[i].requires_grad
        ]
        self._compares_memory = flat.shared is not None
        if self._compares_memory:
            self._shared = flat.shared
            # An empty tensor lies nowhere, and may be a part of any memory.
            self._has_empty = any(tensor.numel() == 0 for tensor in found)
            self._bytes_before = [o * t.element_size() for o, t in zip(self._offsets, found, strict=True)]
            staying = [place_of[i] for i in kept if i in place_of]
            passing = sorted(set(range(len(found))) - set(staying))
            self._staying, self._passing = _picker(staying), _picker(passing)
            self._lie_at: tuple[Any, frozenset[int]] = ((), frozenset())
            self._remember_addresses(self._bases(found))

    def recognise(self, leaves: list[Any], static: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The tensors among the leaves if a call of this structure certainly has this signature, else None."""
        for index, described in self._constants:
            if describe_leaf(leaves[index]) != described:
                return None
        if static or self._static:
            now = describe_static(static)
            # Equal by its own lights and of the same hash: an object that counts as itself may have changed inside.
            if hash(now) != self._static_hash or now != self._static:
                return None
        tensors = leaves if self._pick is None else list(self._pick(leaves))
        if not self._like(*self._pick_once(tensors)):
            return None
        for index, other in self._twice:
            if tensors[index] is not tensors[other]:
                return None
        if any(map(_offset, tensors)) if not self._offset_any else list(map(_offset, tensors)) != self._offsets:
            return None
        for index, history in self._with_history:
            if (tensors[index].grad_fn is not None) != history:
                return None
        if self._compares_memory and not self._shares_as_before(tensors):
            return None
        return tensors

    def _bases(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Where the memory of each tensor begins; the same for tensors that share it."""
        addresses = list(map(_address, tensors))
        return list(map(operator.sub, addresses, self._bytes_before)) if self._offset_any else addresses

    def _shares_as_before(self, tensors: list[torch.Tensor]) -> bool:
        """Whether those tensors share memory that did.

        Memory that begins in different places is not shared. So if nothing was shared, it is enough that all begin in
        different places; those that lie where they lay a call ago did so then.
        """
        bases = self._bases(tensors)
        if not self._shared and not self._has_empty:
            where, among = self._lie_at
            new = self._passing(bases)
            if self._staying(bases) == where:
                if len(set(new)) == len(new) and among.isdisjoint(new):
                    return True
            elif len(set(bases)) == len(bases):
                self._remember_addresses(bases)
                return True
        # Two pieces of memory that begin in one place still count as two.
        return sharing_pattern(tensors) == self._shared

    def _remember_addresses(self, bases: list[int]) -> None:
        where = self._staying(bases)
        # As one value, since another thread may be reading it. Told apart from each other when they were seen.
        if len(set(where)) == len(where):
            self._lie_at = (where, frozenset(where))


class RememberedCalls(Generic[T]):
    """The last few calls of different signatures, the latest first, each with a value that belongs to it."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed: threads may read it at any time.
        self._calls: tuple[_Call[T], ...] = ()

    def recognise(
        self, place: Any, args: tuple[Any, ...], static: tuple[Any, ...]
    ) -> tuple[T, list[torch.Tensor]] | None:
        """Find what belongs to a call that is certainly like a remembered one.

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

    def remember(self, place: Any, flat: Flat, kept: Sequence[int], value: T) -> None:
        """Remember a call, and forget the one that was made longest ago.

        Args:
            place: as for `recognise`.
            flat: the arguments.
            kept: indices of leaves that the step returns in the same memory.
            value: what belongs to it.
        """
        calls = self._calls
        same = (call.structure for call in calls if call.structure.spec == flat.spec)
        call = _Call(place, flat, next(same, None) or Structure(flat.spec), kept, value)
        self._calls = (call, *calls[: MOST - 1])


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gets the items at some places of a sequence, as a tuple."""
    if not indices:
        return lambda items: ()
    if len(indices) == 1:  # for one index an itemgetter does not make a tuple
        (only,) = indices
        return lambda items: (items[only],)
    return operator.itemgetter(*indices)
