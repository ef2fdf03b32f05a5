"""Whether tensors are of the same kind as others were: type, dtype, device, shape, strides and more, at C++ speed.

The one place that touches `torch._C._dynamo.guards.TensorGuards`, a private part of PyTorch that `torch.compile` checks
its inputs with. What is relied on: it is made from tensors and the fixed sizes and strides of each; it keeps none of
them alive; `check` is true only if every argument has the exact Python type, dispatch keys (layout, conjugate and
negative bits, inference), dtype, device, `requires_grad`, sizes and strides that its predecessor had, and no tensor
object is passed twice. It does not look at storage. Where it is missing, or does not recognise the tensors that it was
made from, the same is asked tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_TensorGuards: Any
try:
    from torch._C._dynamo import guards

    _TensorGuards = guards.TensorGuards
except (ImportError, AttributeError):
    _TensorGuards = None


def tensors_like(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], bool]:
    """A function that says whether as many objects in a row are tensors of the same kinds as these.

    Args:
        tensors: strided tensors; they are not kept alive.

    Returns:
        The function. Its answer covers type, dtype, device, layout, conjugate and negative bits, `requires_grad`, sizes
        and strides; not where in memory a tensor lies. It may be false for tensors that are alike, never true for
        others.
    """
    first: dict[int, int] = {}
    again = [(i, first[id(t)]) for i, t in enumerate(tensors) if first.setdefault(id(t), i) != i]
    if not again:
        return _distinct_like(tensors)
    # An object that comes twice is passed once, and has to come twice again.
    once = sorted(first.values())
    like = _distinct_like([tensors[i] for i in once])

    def check(objects: Sequence[Any]) -> bool:
        return all(objects[i] is objects[j] for i, j in again) and like([objects[i] for i in once])

    return check


def _distinct_like(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], bool]:
    if _TensorGuards is not None and tensors:
        # From the last to the first: what differs between calls is most often the batch, and it comes last.
        backwards = tensors[::-1]
        try:
            check: Callable[..., bool] = _TensorGuards(
                *backwards,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in backwards],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in backwards],
            ).check
            if check(*backwards):
                return lambda objects: check(*objects[::-1])
        except TypeError:
            pass  # made in another way in this release
    kinds = [_guarded_properties(tensor) for tensor in tensors]
    return lambda objects: all(
        isinstance(item, torch.Tensor) and _guarded_properties(item) == kind
        for item, kind in zip(objects, kinds, strict=True)
    )


def _guarded_properties(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:  # others have no strides to ask for
        return type(tensor), tensor.layout
    return (
        type(tensor), tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, tensor.stride(),
        tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip
