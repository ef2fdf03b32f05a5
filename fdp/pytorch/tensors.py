"""What a tensor is as an object: its place in memory, and whether a transform of torch.func has wrapped it.

Private parts of torch that are relied on: `UntypedStorage._cdata`, the identity of a piece of memory, and
`torch._C._functorch.is_functorch_wrapped_tensor`, true within `grad`, `jvp` and `vmap`.
"""

from __future__ import annotations

from typing import Any

import torch


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a strided tensor lies, and how: two that agree in it are the same memory under the same shape."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func has wrapped a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
