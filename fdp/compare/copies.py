"""Inputs for runs without side effects: copies of a call's inputs, as they are or perturbed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from fdp.errors import error_text
from fdp.plan import Plan

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

_PERIOD = 8191
"""Elements after which the factors repeat: a prime, so that no two rows of a matrix are moved alike."""

MOVES = (0.125, 0.01)
"""By how much inputs are perturbed at most, relative to what they are: the first of these that the step can take."""

_MOVED = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
})  # fmt: skip


def copy_of(tensor: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """A copy with the same geometry, also of a tensor that overlaps itself, has gaps, or begins late in its memory.

    Args:
        tensor: what to copy.
        memory: an earlier copy of it, in whose memory to make this one; None takes new memory.
    """
    tensor = tensor.detach()
    offset = tensor.storage_offset()
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    if memory is None:
        memory = torch.empty(offset + size, dtype=tensor.dtype, device=tensor.device)
    else:
        # Another view: the earlier copy keeps its own shape and flags.
        memory = memory.detach().as_strided((offset + size,), (1,), 0)
    memory[offset:].copy_(tensor.as_strided((size,), (1,), offset))
    # Not a view: a step may call `detach_` of what it is given.
    return memory.as_strided(tensor.shape, tensor.stride(), offset).data


def inputs_for_one_run(plan: Plan, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs for one run of a step: copies of those that it may change, and the others as they are."""
    return [
        copy_of(tensor) if item.donated else tensor for item, tensor in zip(plan.trace.inputs, tensors, strict=True)
    ]


def perturb_(copy: torch.Tensor, move: float, seed: int) -> torch.Tensor:
    """Perturb a copy, because first inputs are often zeros, or the same values again and again.

    Each element gets smaller by a share of its own, which keeps probabilities and variances what they are; what is zero
    becomes a small positive number. Integers, booleans and keys stay, since they are places, counts and seeds.

    Args:
        copy: made by `copy_of`; it is changed.
        move: the largest share.
        seed: another one for each input, or two equal inputs would stay equal.

    Returns:
        The copy.
    """
    if copy.dtype not in _MOVED or not copy.numel() or not move:
        return copy
    # With the gaps between elements, each of which is there once: a copy that overlaps itself still does.
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.itemsize,), (1,), 0)[copy.storage_offset() :]
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(_PERIOD, generator=generator, device="cpu").to(device=copy.device, dtype=copy.dtype)
    smaller, instead = 1 - move * shares, move / 8 * (0.25 + shares)
    whole = len(flat) // _PERIOD * _PERIOD
    for piece, rows in ((flat[:whole].view(-1, _PERIOD), 1), (flat[whole:], 0)):
        count = _PERIOD if rows else len(piece)
        if not piece.all():
            piece.copy_(torch.where(piece == 0, instead[:count], piece * smaller[:count]))
        else:
            piece.mul_(smaller[:count])
    return copy


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. (The CPU's allocator raises a plain RuntimeError.)"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in error_text(error) for text in _OUT_OF_MEMORY)


def give_back_memory() -> None:
    """Return freed memory to the system: glibc would keep it, and it is more than the steps will ever use.

    (This relies on `malloc_trim`, which glibc alone has; elsewhere nothing happens.)
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
