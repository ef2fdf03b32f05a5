"""Values of tensors under functionalization (`capture.capture_functional`).

Private to torch: `torch._C._functorch.is_functionaltensor`, which says whether a tensor is one whose changes are made
new values (`unwrapped` is its newest one); `torch._functionalize_replace` gives it another one,
`_functionalize_commit_update` passes that on to what it is a view of, `_functionalize_sync` has it take what its views
were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.pytorch.tensors import unwrapped


def keep_strides(tensor: torch.Tensor, stride: Sequence[int]) -> None:
    """Under functionalization, give the newest value of a tensor the strides that the tensor was made with.

    A change in place makes a new value, which may lie otherwise: what is changed through a transposed view is turned
    back. Views that are taken later are views of that value; under other strides they would see other elements.

    Args:
        tensor: one that is a view of no other.
        stride: the distance of its elements, in elements, as it was made.
    """
    if not torch._C._functorch.is_functionaltensor(tensor):
        return
    torch._functionalize_sync(tensor)
    value = unwrapped(tensor)
    lies = (n == 1 or s == t for n, s, t in zip(value.shape, stride, value.stride(), strict=True))
    if value.numel() == 0 or all(lies):
        return
    new = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    torch._functionalize_sync(new)
    torch._functionalize_replace(tensor, unwrapped(new))
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def bring_up_to_date(target: object, args: Sequence[Any]) -> None:
    """Under functionalization, before a view is taken: give the base its newest value.

    What reads elements asks for the newest value itself. A view does not: it is taken of the value that its tensor had
    last, and that value may lie otherwise than `keep_strides` laid out the memory since. A view of such strides may not
    exist.

    Args:
        target: what will be called.
        args: with these arguments.
    """
    if not isinstance(target, OpOverload) or not args or not isinstance(args[0], torch.Tensor):
        return
    alias = schema_of(target).arguments[0].alias_info
    if alias is not None and not alias.is_write and torch._C._functorch.is_functionaltensor(args[0]):
        torch._functionalize_sync(args[0])
