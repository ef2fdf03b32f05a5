"""Which writes to memory a read sees: the newest one of each byte that the tensor has, not those in its gaps."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fdp.verify.extents import UNBOUNDED
from fdp.verify.runs import both, runs_of, without

Write: TypeAlias = "tuple[int, int, tuple[Any, ...] | None]"
"""Begin and end of some bytes, and the writes to them, the newest first."""

_EXACT_UNITS = 2**22
"""Up to so many elements, the bytes of a view with gaps are compared element by element."""


def visible_writes(view: Any, pieces: list[Write], nothing: Any) -> list[Write]:
    """Of pieces of memory, those that a view reads, and of the writes to each those that it sees.

    Args:
        view: has `start` (in bytes), `shape`, `stride` (in elements), `dtype` and `span` (in bytes).
        pieces: the memory of the view, in order; writes are described as the view is.
        nothing: stands for what was there before all writes.

    Returns:
        The pieces; where that cannot be found out in little time, all of them.
    """
    stores = [store for _, _, layers in pieces for store in layers or ()]
    in_runs = _visible_in_runs(view, pieces, stores, nothing)
    if in_runs is not None:
        return in_runs
    unit = min(view.dtype.itemsize, *(store.dtype.itemsize for store in stores), 8)
    size = -(-view.span // unit)
    edges = [view.start, *(store.start for store in stores), *(low for low, _, _ in pieces)]
    if view.span >= UNBOUNDED or any((edge - view.start) % unit for edge in edges):
        return pieces
    if not all(_is_small(each, unit, size) for each in (view, *stores)):
        return pieces
    needed = _mask(view, view.start, size, unit)
    found: list[Write] = []
    for low, high, layers in pieces:
        first, last = (low - view.start) // unit, (high - view.start) // unit
        left = needed[first:last].clone()
        if not bool(left.any()):
            continue
        seen = []
        for store in layers or ():
            covered = _mask(store, view.start, size, unit)[first:last]
            if bool((left & covered).any()):
                seen.append(store)
                left &= ~covered
        whole = (*seen, nothing) if bool(left.any()) else tuple(seen)
        if found and found[-1][2] == whole:
            found[-1] = (found[-1][0], high, whole)
        else:
            found.append((low, high, whole))
    return found


def _visible_in_runs(view: object, pieces: list[Write], stores: list[Any], nothing: object) -> list[Write] | None:
    """As `visible_writes`, if all have few runs of bytes; else None."""
    whole = runs_of(view)
    covers = {id(store): runs_of(store) for store in stores}
    if whole is None or any(runs is None for runs in covers.values()):
        return None
    found: list[Write] = []
    for low, high, layers in pieces:
        left = both(whole, [(low, high)])
        if not left:
            continue
        seen = []
        for store in layers or ():
            covered = covers[id(store)] or []
            if both(left, covered):
                seen.append(store)
                left = without(left, covered)
        all_seen = (*seen, nothing) if left else tuple(seen)
        if found and found[-1][2] == all_seen:
            found[-1] = (found[-1][0], high, all_seen)
        else:
            found.append((low, high, all_seen))
    return found


def _is_small(geometry: Any, unit: int, size: int) -> bool:
    """Whether a geometry can be looked at element by element."""
    elements = geometry.dtype.itemsize // unit
    for number, step in zip(geometry.shape, geometry.stride, strict=True):
        if type(number) is not int or type(step) is not int:
            return False
        elements *= number if step else 1
    result: bool = max(elements, size) <= _EXACT_UNITS
    return result


def _mask(geometry: Any, start: int, size: int, unit: int) -> torch.Tensor:
    """The units of memory that a geometry touches, from a byte on."""
    each = geometry.dtype.itemsize // unit
    at = torch.arange(each, device="cpu") + (geometry.start - start) // unit
    for number, step in zip(geometry.shape, geometry.stride, strict=True):
        if step:
            at = (at.unsqueeze(-1) + torch.arange(number, device="cpu") * (step * each)).reshape(-1)
    mask = torch.zeros(size, dtype=torch.bool, device="cpu")
    mask[at[(at >= 0) & (at < size)]] = True
    return mask
