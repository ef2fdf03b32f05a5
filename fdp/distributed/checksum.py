"""A checksum of 32 bits for a part of a tensor, fast enough for every call of a step.

It depends on the elements in the order of the tensor's shape, and not on where they lie in memory. So ranks may hold a
tensor in other strides. It changes with any single bit, and where two elements change places. It is no protection
against someone who looks for equal numbers.
"""

from __future__ import annotations

import ctypes
import functools
import zlib

import torch

from fdp.distributed.fingerprint import mixed_sum

BITS = 32

_ROW = 64
"""Words of eight bytes in a row. Slices of a tensor begin at a multiple of so many elements."""

_LARGE_BYTES = 1 << 15
"""From here on sums of rows and columns are quicker than one CRC of all bytes: up to ten times."""


def checksum_of_memory(address: int, size_bytes: int) -> int:
    """The checksum of some bytes in the memory of this process.

    Args:
        address: where they begin.
        size_bytes: how many there are.

    Returns:
        A number from 0 to 2**32 - 1.
    """
    if size_bytes < _LARGE_BYTES:
        return zlib.crc32(_bytes(size_bytes).from_address(address))
    # One bit changes a sum of a row and a sum of a column. Two elements that change places change sums of columns, or
    # sums of rows.
    row_bytes = 8 * _ROW
    rows = size_bytes // row_bytes
    memory = _bytes(size_bytes).from_address(address)
    words = torch.frombuffer(memory, dtype=torch.int64, count=rows * _ROW).view(rows, _ROW)
    number = 0
    for sums in (words.sum(0), words.sum(1)):
        number = zlib.crc32(_bytes(8 * sums.numel()).from_address(sums.data_ptr()), number)
    left = size_bytes - rows * row_bytes
    return zlib.crc32(_bytes(left).from_address(address + rows * row_bytes), number) if left else number


@functools.cache
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The ctypes array type of so many bytes. Making it takes longer than reading some thousand bytes."""
    return ctypes.c_char * count


def checksum(tensor: torch.Tensor, start: int, stop: int) -> int | torch.Tensor:
    """The checksum of some elements of a tensor.

    Args:
        tensor: any dense tensor, on any device.
        start: the first element, in the order of its shape.
        stop: the one behind the last.

    Returns:
        For a tensor on the CPU a number from 0 to 2**32 - 1. On another device it stays there, and nothing waits for
        it: a number of 64 bits, of shape [].

    Example:
        >>> x = torch.arange(12.0).view(3, 4)
        >>> checksum(x, 2, 9) == checksum(x.t().contiguous().t(), 2, 9), checksum(x, 2, 9) == checksum(x, 2, 10)
        (True, False)
    """
    part = _elements(tensor.detach(), start, stop)
    if part.device.type != "cpu":
        return mixed_sum(part)
    return checksum_of_memory(part.data_ptr(), part.numel() * part.itemsize)


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some elements as one contiguous piece; copies hardly more than these."""
    while not tensor.is_contiguous():
        inner = tensor.numel() // tensor.shape[0]
        first, last = start // inner, -(-stop // inner)
        start, stop = start - first * inner, stop - first * inner
        if last - first > 1 or tensor.ndim == 1:
            tensor = tensor[first:last].contiguous()
            break
        tensor = tensor[first]
    return tensor.reshape(-1)[start:stop].resolve_conj().resolve_neg()
