"""How tensors lie in memory: shapes and strides, some of which may not be known ahead."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

UNBOUNDED = 2**62
"""The span of what is of unknown size."""


class Extent(NamedTuple):
    """How a tensor of a shape and strides lies, in elements.

    Attributes:
        shape: its shape; what is not known ahead is an expression.
        stride: its strides; 0 for a dimension of size one, whatever is said there.
        span: from its first element to behind its last.
        numel: its elements; -1 if that is not known.
        dense: whether it has no gaps and no element twice.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    span: int
    numel: int
    dense: bool


@functools.lru_cache(maxsize=65536)
def extent_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Extent:
    """The extent of a shape and strides that are known."""
    numel, span = 1, 1
    for size, step in zip(shape, stride, strict=True):
        numel *= size
        span += (size - 1) * step
    if numel == 0:
        return Extent(shape, (0,) * len(shape), 0, 0, True)
    stride = tuple(0 if size == 1 else step for size, step in zip(shape, stride, strict=True))
    dense, expected = True, 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        dense = dense and step == expected
        expected *= size
    return Extent(shape, stride, span, numel, dense)


def comparable_number(number: Any) -> Any:
    """A number as something that can be compared: one that is read from a tensor is an expression."""
    return number if type(number) is int else number.node.expr if hasattr(number, "node") else int(number)


def general_extent(shape: Any, stride: Any) -> Extent:
    """The extent of a shape and strides, some of which may not be known ahead."""
    try:
        return extent_of(tuple(shape), tuple(stride))
    except TypeError:  # symbolic numbers cannot be hashed
        shape, stride = tuple(map(comparable_number, shape)), tuple(map(comparable_number, stride))
        if all(type(number) is int for number in (*shape, *stride)):
            return extent_of(shape, stride)
        return Extent(shape, stride, UNBOUNDED, -1, False)
