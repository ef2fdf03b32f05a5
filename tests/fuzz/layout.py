"""How gradients lie in memory, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch


def in_layout_of(x: Any, grad: Any) -> Any:
    """The same values, and the strides that a copy of another tensor has; by rows where that lies upon itself."""
    if x.requires_grad:
        return grad
    lies = torch.empty(x.shape) if lies_upon_itself(x) else torch.empty_like(x)
    return grad if lies.stride() == grad.stride() else torch.empty_like(lies, dtype=grad.dtype).copy_(grad)


def in_layout_that_is_known(x: Any, grad: Any, ranks: int) -> Any:
    """A gradient of several ranks lies as its parameter does.

    A sum lies as its first part does, or its second. In which order parts come, that other ranks sent, is the backward
    pass's own business: here it differs from rank to rank.
    """
    if ranks == 1 or lies_upon_itself(grad):
        return grad
    return in_layout_of(x.detach(), grad)


def with_rows(x: Any) -> Any:
    """The same tensor, whose gradient lies row by row."""
    if isinstance(x, torch.Tensor) and x.requires_grad:
        x.register_hook(lambda grad: grad.contiguous())
    return x


def lies_upon_itself(x: Any) -> bool:
    """Whether two elements are one place in memory."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if step <= reach:
            return x.numel() > 0
        reach += (size - 1) * step
    return False
