"""The mean of a gradient over ranks, and the record of its extremes."""

from __future__ import annotations

import torch

from fdp.collectives.markers import all_reduce, wire_mean
from fdp.collectives.operators import in_forward_mode
from fdp.context.accumulating import memory_order
from fdp.context.axis import Axis, current_axis
from fdp.context.looking import current_look, extremes
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.tensors import under_transform


def refuse_sparse(grad: torch.Tensor, label: str) -> None:
    """Refuse a gradient that does not go into a bucket."""
    if grad.layout != torch.strided:
        raise ArgumentError(
            build_message(
                f"the gradient of {label} is sparse ({grad.layout}), and buckets are dense.",
                remedy="make it dense; for an embedding, pass sparse=False.",
            )
        )


def average(grad: torch.Tensor, source: torch.Tensor, label: str) -> torch.Tensor:
    """The mean of a gradient over ranks.

    Args:
        grad: this rank's.
        source: what it is the gradient of, for the order of its elements in memory.
        label: its key path.

    Returns:
        A tensor of the shape of `grad`.
    """
    refuse_sparse(grad, label)
    look = current_look()
    if look is None:
        return _averaged(grad, source, label)
    if under_transform():
        raise ArgumentError(
            build_message(
                f"check_finite=True cannot check the gradient of {label}, which is taken inside of torch.func.grad, "
                "vmap or another transform.",
                remedy="take gradients of ranks outside of transforms; inside, use torch.func.grad.",
            )
        )
    own = extremes(grad)
    mean = _averaged(grad, source, label)
    look.show(label, own, extremes(mean))
    return mean


def _averaged(grad: torch.Tensor, source: torch.Tensor, label: str) -> torch.Tensor:
    axis = current_axis()
    # The bucket holds the gradient in the memory order of its parameter, which is the same on every rank (that
    # of the gradient need not be) and spares the optimizer a copy.
    order = None if under_transform() else memory_order(source)
    if grad.is_complex():
        pairs = torch.view_as_real(grad.resolve_conj())
        return _no_view(torch.view_as_complex(_mean(pairs, axis, label)))
    if order is None:
        return _mean(grad, axis, label)
    back = sorted(range(len(order)), key=order.__getitem__)
    return _no_view(_mean(grad.permute(order), axis, label).permute(back))


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """Make a result no view, like those of `torch.autograd.grad`, so that `detach_` works."""
    return x if x.requires_grad or in_forward_mode() or under_transform() else x.data


def _mean(grad: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
    if axis.wire is None:
        return all_reduce(grad, "mean", axis.name, "gradient", label)
    return wire_mean(grad, axis.name, axis.size, label, axis.wire)
