"""The memory of rank-local results, which steps have returned and which differ from rank to rank.

A tensor that lies in it, whichever object it is (the result itself, a view, a `detach()`, an array of NumPy), does not
go in again as replicated state. Nothing here keeps memory alive.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Private to torch, and used by its own modules. Relied on: it does not keep a storage alive; while it exists, `cdata`
# is given to no other storage; `_new_with_weak_ptr(cdata)` is the storage, or None if it is gone.
from torch.multiprocessing.reductions import StorageWeakRef

from fdp.pytorch.tensors import storage_id

_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class _Note:
    """A piece of memory with rank-local values.

    Attributes:
        memory: the storage.
        end: the address behind it.
        what: what lies in it, in words.
    """

    memory: StorageWeakRef
    end: int
    what: str


notes: dict[int, _Note] = {}
"""What is known, by the address where it begins; mostly empty, so that a caller asks whether it is."""

_bases: list[int] = []
"""The keys of `notes` in ascending order; replaced as a whole, since other threads may be reading it."""

_made = 0
"""Notes that were made since those of memory that is gone were dropped."""

_changing = threading.Lock()


def note(results: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Record that tensors hold rank-local values, each with a description."""
    global _bases, _made
    for tensor, what in results:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        before = notes.get(base)
        if not base or (before is not None and before.what == what and before.memory.cdata == storage_id(storage)):
            continue
        with _changing:
            is_new = base not in notes
            notes[base] = _Note(StorageWeakRef(storage), base + storage.nbytes(), what)
            _made += 1
            if _made > max(64, len(notes)):
                for gone in [base for base, known in notes.items() if known.memory.expired()]:
                    del notes[gone]
                _made, _bases = 0, sorted(notes)
            elif is_new:
                rising = _bases.copy()
                bisect.insort(rising, base)
                _bases = rising


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Record that tensors are the same on every rank from now on."""
    for tensor in tensors:
        if tensor.layout == torch.strided:
            _drop(tensor.untyped_storage().data_ptr())


def find(tensors: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
    """The tensors that lie in rank-local memory: for each its index, and the description of that memory."""
    addresses = list(map(_address, tensors))
    bases = _bases
    # Mostly none does. Of both rows, the longer one is searched.
    if len(bases) < len(addresses):
        rising = sorted(addresses)
        ends = [(base, known.end) for base in bases if (known := notes.get(base)) is not None]
        if not any((at := bisect.bisect_left(rising, base)) < len(rising) and rising[at] < end for base, end in ends):
            return []
    found = []
    for index, address in enumerate(addresses):
        at = bisect.bisect_right(bases, address) - 1
        known = notes.get(bases[at]) if at >= 0 else None
        if known is not None and address < known.end and _is_there(bases[at], known):
            found.append((index, known.what))
    return found


def _is_there(base: int, known: _Note) -> bool:
    """Whether memory is still the recorded one, and not other memory at the same address."""
    storage = torch.UntypedStorage._new_with_weak_ptr(known.memory.cdata)
    if storage is not None and storage.data_ptr() == base:
        return True
    _drop(base)
    return False


def _drop(base: int) -> None:
    global _bases
    if base in notes:
        with _changing:
            notes.pop(base, None)
            _bases = sorted(notes)
