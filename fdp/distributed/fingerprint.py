"""A number for the bits of a tensor, to compare tensors between ranks without sending them."""

from __future__ import annotations

import torch

_CHUNK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no bit of the position is lost


def fingerprint(tensor: torch.Tensor) -> int:
    """Hash the bits of a tensor, its shape and its dtype; the memory layout does not matter.

    Args:
        tensor: any dense tensor, on any device.

    Returns:
        A signed 64-bit number. Equal tensors have equal numbers, -0.0 and 0.0 have different ones, and so have
        NaNs of different bits; different tensors have equal numbers about once in 2**64.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
        (True, False)
    """
    total = mixed_sum(tensor.detach().resolve_conj().resolve_neg().contiguous())
    description = f"{tuple(tensor.shape)} {tensor.dtype}"
    for character in description:
        total = total * 31 + ord(character)
    return int(total)


def mixed_sum(plain: torch.Tensor) -> torch.Tensor:
    """The sum of the words of a tensor's memory, each mixed with its position.

    Args:
        plain: contiguous, not conjugated.

    Returns:
        A signed 64-bit number, of shape [], on the tensor's device. Nothing waits for it.
    """
    # Not reshape(-1): of a single element it keeps whatever stride that has, and then there is no view as bytes.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    if flat.numel() % 8 == 0 and flat.data_ptr() % 8 == 0:
        words = flat.view(torch.int64)
    else:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        words = padded.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    positions = torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=flat.device)
    mixing, shifted = torch.empty_like(positions), torch.empty_like(positions)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        # In two pieces of memory: with new ones for each operator it takes three times as long.
        mixed, moved = mixing[: chunk.numel()], shifted[: chunk.numel()]
        torch.bitwise_right_shift(chunk, 29, out=mixed)
        mixed.bitwise_xor_(chunk).mul_(_MULTIPLIER).add_(positions[: chunk.numel()]).add_(start)
        torch.bitwise_right_shift(mixed, 32, out=moved)
        mixed.bitwise_xor_(moved).mul_(_MULTIPLIER)
        torch.bitwise_right_shift(mixed, 29, out=moved)
        total += mixed.bitwise_xor_(moved).sum()
    return total
