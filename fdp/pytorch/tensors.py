"""What a tensor is as an object: its place in memory, its version, and what torch makes of it without telling.

Private parts of torch that are relied on:

- `UntypedStorage._cdata` and `Generator._cdata`, which identify a piece of memory and a generator: Python may have
  several objects for one of them, one after the other or at a time. Fake tensors have them, too.
- `Tensor._version`, which each change in place raises; a tensor made in inference mode has none.
- `Tensor._is_zerotensor`, true of zeros that have no memory, as autograd makes them.
- `torch._neg_view`, a view with the negative bit; `torch.Tensor.neg` may copy.
- `torch._C._functorch.is_functorch_wrapped_tensor`, true of a tensor within `grad`, `jvp` and `vmap`,
  `torch._C._functorch.get_unwrapped`, what a transform has wrapped, and `torch._C._functorch.peek_interpreter_stack`,
  which has something on it within these.

What calls ask for on the way is bound as it is, so that no Python lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

storage_id: Callable[[Any], int] = attrgetter("_cdata")
"""The identity of an untyped storage: storages that are the same memory have the same one while they live."""

unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
"""What the innermost wrapper of a tensor holds: of a transform of torch.func, or of functionalization."""

is_zero_without_memory: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is zeros that have no memory."""


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same values in memory of its own, laid out alike, that no gradient goes back through."""
    return torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a strided tensor's elements, in the order of its indices. NumPy knows fewer dtypes."""
    # Into new memory: one element may have any stride, and then cannot be looked at as bytes.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu").copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a strided tensor lies, and how: two that agree in it are the same memory under the same shape."""
    return (
        storage_id(tensor.untyped_storage()),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory: two of one storage that agree in it have the same elements.

    A sparse tensor, which has no strides and looks like its own transpose, agrees with no other.
    """
    is_strided = tensor.layout is torch.strided
    return (
        tuple(tensor.shape),
        tuple(tensor.stride()) if is_strided else (),
        tensor.storage_offset() if is_strided else 0,
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        None if is_strided else id(tensor),
    )


def generator_id(generator: object) -> int | None:
    """The identity of a generator: an operator may be given another object for the same one.

    Returns:
        It; None for what is no generator.
    """
    return getattr(generator, "_cdata", None)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place; tensors made in inference mode do not count, and have 0."""
    return 0 if tensor.is_inference() else tensor._version


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, read as the negative of what it holds."""
    return torch._neg_view(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func has wrapped a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of torch.func have wrapped, one in another; the tensor itself outside of these."""
    while is_transformed(tensor):
        tensor = unwrapped(tensor)
    return tensor


def under_transform() -> bool:
    """Whether this runs inside `torch.func.grad`, `vmap` or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None
