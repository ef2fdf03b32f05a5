"""Change numbers in their last places, as rounding does."""

from __future__ import annotations

import torch


def change_last_places_(
    tensor: torch.Tensor, units: float, generator: torch.Generator, whole: bool = False
) -> torch.Tensor:
    """Change a tensor in place, each element by up to some units in its last place.

    Whole numbers stay, but for large ones: they are counts, masks and signs, which do not round. So do dtypes that are
    not floating-point, and those of eight bits. What is infinite or would be stays too: masks hold such numbers.

    Args:
        tensor: of any shape and dtype.
        units: how far, at most.
        generator: of the tensor's device.
        whole: whether whole numbers change as well.

    Returns:
        The tensor.
    """
    if not rounds(tensor) or not tensor.numel():
        return tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    eps = torch.finfo(real.dtype).eps
    wide = torch.promote_types(real.dtype, torch.float32)
    away = torch.rand(real.shape, dtype=wide, device=real.device, generator=generator)
    moved = (real + real * away.mul_(2 * units * eps).sub_(units * eps)).to(real.dtype)
    stays = ~moved.isfinite()
    if not whole:
        stays |= (real == real.round()) & (real.abs() < 1 / (8 * eps))
    real.copy_(torch.where(stays, real, moved))
    return tensor


def rounds(tensor: torch.Tensor) -> bool:
    """Whether values of a tensor's dtype are rounded, and can be moved by a unit in the last place."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1 and not tensor.is_conj()
