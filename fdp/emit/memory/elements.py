"""Where the elements of a tensor lie in its memory: in which order, with gaps between them, several in one place.

A step may ask how its state lies: `contiguous` and `reshape` copy some tensors, and are views of others. So what a step
returns lies as the step itself would leave it, also where it is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lies_as(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in memory in one way: what asks for a layout treats them alike.

    Strides of dimensions of size one count as well: what looks for channels_last looks at them.
    """
    return one.numel() == 0 or one.stride() == two.stride()


def lies_under(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor lie under given strides; those of dimensions of size one move none."""
    return all(n == 1 or s == t for n, s, t in zip(tensor.shape, stride, tensor.stride(), strict=True))


def has_each_element_once(value: torch.Tensor) -> bool:
    """Whether a tensor can be written to: no two of its elements lie in one place."""
    return value.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense.default(value) or has_gaps(value)


def has_gaps(value: torch.Tensor) -> bool:
    """Whether there are elements between those of a tensor that are not its own, and none of its own is there twice."""
    if value.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense.default(value):
        return False
    span = 0  # of the dimensions so far, the element that lies last
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride <= span:
            return False  # elements may lie in one place
        span += (size - 1) * stride
    return True


def span_of(value: torch.Tensor) -> int:
    """How many elements there are from the first of a tensor to its last, those that are not its own included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def laid_out(tensor: torch.Tensor, stride: Sequence[int], anew: bool = False) -> torch.Tensor:
    """A tensor, or a copy, whose elements lie under given strides.

    Args:
        tensor: any tensor.
        stride: how its elements are to lie. Where two come to lie in one place they are equal.
        anew: whether it must be a copy.
    """
    size = tensor.shape
    if not anew:
        if tuple(stride) == tensor.stride():
            return tensor
        if lies_under(tensor, stride):
            return tensor.as_strided(size, stride)
    reach = 1
    for step, number in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step < reach:
            places = offsets(size, stride)
            flat = tensor.new_empty(int(places.max()) + 1 if tensor.numel() else 0)
            flat[places.to(tensor.device)] = tensor.reshape(-1)
            return flat.as_strided(size, stride)
        reach += (number - 1) * step
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def offsets(size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Where each element lies, in the order of the elements."""
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    for number, step in zip(size, stride, strict=True):
        found = (found.unsqueeze(1) + torch.arange(number, device="cpu") * step).reshape(-1)
    return found
