"""Which tensors share memory, by address.

Two tensors may have storages of their own and share bytes all the same: views of one NumPy array, or of one DLPack
capsule. So memory is compared by the addresses at which storages begin and end. (Memory that the system has mapped
twice, at two addresses, is not seen.)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch

from fdp.pytorch.tensors import is_zero_without_memory, storage_id


def memory_groups(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Number the pieces of memory of tensors: tensors that share memory get one number.

    Args:
        tensors: of any layout; one that is not strided, or zeros without memory, lies nowhere that can be asked for.

    Returns:
        A number for each tensor. Tensors have the same number if their storages share a byte, directly or through the
        storages of others, or are one.

    Example:
        >>> x = torch.zeros(4)
        >>> memory_groups([x, torch.zeros(2), x[1:]])
        [0, 1, 0]
    """
    numbers: dict[int, int] = {}
    pieces: list[tuple[str, int, int, int, int]] = []
    found = []
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or is_zero_without_memory(tensor):
            found.append(index)
            continue
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage_id(storage), index)
        found.append(number)
        if number == index and (start := storage.data_ptr()):  # tensors without values begin nowhere
            device = tensor.device
            pieces.append((device.type, device.index or 0, start, start + storage.nbytes(), index))
    if len(pieces) < 2:
        return found
    same = dict(_merged(sorted(pieces)))
    return [same.get(number, number) for number in found] if same else found


def _merged(pieces: Iterable[tuple[str, int, int, int, int]]) -> Iterable[tuple[int, int]]:
    """Which pieces, in the order of their addresses, belong to one that began before they do."""
    where: tuple[str, int] | None = None
    end = owner = -1
    for kind, device, start, stop, index in pieces:
        if where == (kind, device) and start < end:
            yield index, owner
            end = max(end, stop)
        else:
            where, end, owner = (kind, device), stop, index


def overlap(starts: Sequence[int], sizes_bytes: Sequence[int]) -> bool:
    """Whether any two pieces of memory share a byte.

    Args:
        starts: where each begins.
        sizes_bytes: how long each is.

    Example:
        >>> overlap([0, 8], [8, 8]), overlap([0, 8], [9, 8])
        (False, True)
    """
    if len(starts) < 2:
        return False
    size_at = dict(zip(starts, sizes_bytes, strict=True))
    if len(size_at) == len(starts):
        # All of it in C, since it is asked at each call of a step. Where any two overlap, two neighbours do.
        in_order = sorted(starts)
        ends = map(operator.add, in_order, map(size_at.__getitem__, in_order))
        return any(map(operator.gt, ends, itertools.islice(in_order, 1, None)))
    end = -1
    for start, size in sorted(zip(starts, sizes_bytes, strict=True)):
        if start < end:
            return True
        end = max(end, start + size)
    return False


def reaches_beyond(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a view has bytes that another tensor in the same storage has not.

    Args:
        view: of any dtype; only its places are looked at.
        whole: likewise.

    Example:
        >>> x = torch.zeros(6)
        >>> reaches_beyond(x[1:3], x), reaches_beyond(x[1:3], x[::2])
        (False, True)
    """
    if view.numel() == 0:
        return False
    # Of memory without gaps, ends are enough.
    begin, end = _ends(whole)
    first, last = _ends(view)
    if first < begin or last > end:
        return True
    if end - begin == whole.numel() * whole.element_size():
        return False
    held = torch.zeros(end, dtype=torch.bool, device="cpu")
    _bytes_of(held, whole).fill_(True)
    return not bool(_bytes_of(held, view).all())


def _ends(x: torch.Tensor) -> tuple[int, int]:
    """Where in its memory a tensor begins and ends, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return int(x.storage_offset()) * x.element_size(), int(x.storage_offset() + last + 1) * x.element_size()


def _bytes_of(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, as elements of `memory`, which has one element for each byte of the storage."""
    size = x.element_size()
    strides = [stride * size for stride in x.stride()]
    return memory.as_strided([*x.shape, size], [*strides, 1], int(x.storage_offset()) * size)
