"""Values of tensors in a function whose changes of memory are made new values (`capture.capture_functional`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keep_strides(tensor: torch.Tensor, stride: Sequence[int]) -> None:
    """Lay the newest value of a tensor out as the tensor was made, in a function that is captured so.

    A change in place makes a new value, which may lie otherwise: what is changed through a transposed view is turned
    back. Views that are taken later are views of that value; under other strides they would see other elements.

    Args:
        tensor: one that is a view of no other.
        stride: the distance of its elements, in elements, as it was made.
    """
    if not torch._C._functorch.is_functionaltensor(tensor):
        return
    torch._functionalize_sync(tensor)
    value = torch._C._functorch.get_unwrapped(tensor)
    lies = (n == 1 or s == t for n, s, t in zip(value.shape, stride, value.stride(), strict=True))
    if value.numel() == 0 or all(lies):
        return
    new = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    torch._functionalize_sync(new)
    torch._functionalize_replace(tensor, torch._C._functorch.get_unwrapped(new))
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)
