"""The strides of tensors: memory order, gaps between elements, elements that share memory.

A step may depend on the strides of its state: `contiguous` and `reshape` copy some tensors, and return views of others.
So results have the strides that the step itself would give them, also where they are copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def same_strides(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides: operators that depend on strides treat them alike.

    Strides of dimensions of size one count as well: what looks for channels_last looks at them.
    """
    return one.numel() == 0 or one.stride() == two.stride()


def has_strides(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether a tensor has given strides; those of dimensions of size one do not count."""
    return all(n == 1 or s == t for n, s, t in zip(tensor.shape, stride, tensor.stride(), strict=True))


def has_each_element_once(value: torch.Tensor) -> bool:
    """Whether a tensor can be written to: no two of its elements share memory."""
    return value.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense.default(value) or has_gaps(value)


def has_gaps(value: torch.Tensor) -> bool:
    """Whether a tensor has gaps between its elements, and no two elements share memory."""
    if value.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense.default(value):
        return False
    span = 0  # the last element, over the dimensions so far
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride <= span:
            return False  # elements may share memory
        span += (size - 1) * stride
    return True


def span_of(value: torch.Tensor) -> int:
    """The number of elements from the first to the last one of a tensor, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def with_strides(tensor: torch.Tensor, stride: Sequence[int], anew: bool = False) -> torch.Tensor:
    """A tensor with given strides; a copy if it has others.

    Args:
        tensor: any tensor.
        stride: the strides. Elements that come to share memory are equal.
        anew: whether it must be a copy.
    """
    size = tensor.shape
    if not anew:
        if tuple(stride) == tensor.stride():
            return tensor
        if has_strides(tensor, stride):
            return tensor.as_strided(size, stride)
    reach = 1
    for step, number in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step < reach:
            positions = offsets(size, stride)
            flat = tensor.new_empty(int(positions.max()) + 1 if tensor.numel() else 0)
            flat[positions.to(tensor.device)] = tensor.reshape(-1)
            return flat.as_strided(size, stride)
        reach += (number - 1) * step
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def offsets(size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The offset of each element, in the order of the elements."""
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    for number, step in zip(size, stride, strict=True):
        found = (found.unsqueeze(1) + torch.arange(number, device="cpu") * step).reshape(-1)
    return found
