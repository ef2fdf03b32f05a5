"""The hash behind `fdp.random`, as two operators of fdp's own: words of 64 bits from a key and numbers.

They are operators, and not the thirty torch operators that each is made of, because a graph then has one node for each
draw, and because on a CPU they process memory in pieces that fit into caches: ten times as fast.

The hash is the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), applied to the number, combined with
the key, and applied again. For each key it is a permutation of the numbers, and for each number one of the keys.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("fdp_random", "DEF")
_library.define("hash(Tensor key, Tensor data, int purpose) -> Tensor")
_library.define("words(Tensor key, SymInt count, int purpose) -> Tensor")

_PIECE = 2**14


def signed(word: int) -> int:
    """The int64 that has the bits of a word of 64 bits, which is all that is kept of a larger number.

    Example:
        >>> signed(2**64 - 1), signed(2**64 + 5)
        (-1, 5)
    """
    return (word + 2**63) % 2**64 - 2**63


# Multiples of the golden ratio's fraction lie far apart (Steele et al., section 5).
_STRIDE = signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mixed(key: torch.Tensor, data: torch.Tensor, purpose: int) -> torch.Tensor:
    """Hash a key with numbers.

    Args:
        key: int64 tensor.
        data: int64 tensor that can be broadcast with it.
        purpose: a word; hashes for different purposes have nothing to do with each other.

    Returns:
        A new int64 tensor of the common shape.
    """
    result: torch.Tensor = Hash.apply(key, data, purpose)
    return result


def words(key: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
    """Hash a key with the numbers from 0 on.

    Args:
        key: int64 tensor.
        count: how many numbers.
        purpose: as for `mixed`.

    Returns:
        A new int64 tensor of shape [*key.shape, count], on the key's device.
    """
    result: torch.Tensor = Words.apply(key, count, purpose)
    return result


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """A permutation, in place, of the words of 64 bits; every bit of the result depends on every bit that was there."""
    # Products of int64 wrap around, and >> brings in copies of the sign, which are masked out.
    z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(_FIRST)
    z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(_SECOND)
    return z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))


def _hash(key: torch.Tensor, data: torch.Tensor, purpose: int) -> torch.Tensor:
    # Not the mixture of key + data * stride alone: two keys could then be two places of one and the same sequence.
    return _mix_(_mix_((data * _STRIDE).add_(purpose)) ^ key)


def _words(key: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
    if key.device.type != "cpu":
        return _hash(key.unsqueeze(-1), torch.arange(count, device=key.device), purpose)
    out = torch.empty((*key.shape, count), dtype=torch.int64, device="cpu")
    rows, keys = out.view(-1, count) if count else out.view(0, 0), key.reshape(-1, 1)
    wide = max(1, _PIECE // max(1, keys.numel()))
    for start in range(0, count, wide):
        piece = rows[:, start : start + wide]
        piece.copy_(_hash(keys, torch.arange(start, min(start + wide, count), device="cpu"), purpose))
    return out


def _fake_words(key: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
    return key.new_empty((*key.shape, count))


def _fake_hash(key: torch.Tensor, data: torch.Tensor, purpose: int) -> torch.Tensor:
    return torch.empty(torch.broadcast_shapes(key.shape, data.shape), dtype=torch.int64, device=key.device)


for _name, _real, _fake in (("hash", _hash, _fake_hash), ("words", _words, _fake_words)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fdp_random::{_name}", _fake)


class _OfIntegers(torch.autograd.Function):
    """A function of three arguments that has no derivative."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None


class Hash(_OfIntegers):
    """`mixed` under every transform."""

    @staticmethod
    def forward(key: torch.Tensor, data: torch.Tensor, purpose: int) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp_random.hash.default(key, data, purpose)
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: torch.Tensor, data: torch.Tensor, purpose: int
    ) -> tuple[torch.Tensor, Any]:
        dims = max(x.dim() - (at is not None) for x, at in zip((key, data), in_dims, strict=False))

        def aligned(x: torch.Tensor, at: int | None) -> torch.Tensor:
            if at is None:
                return x
            x = x.movedim(at, 0)
            return x.reshape(x.shape[0], *[1] * (dims + 1 - x.dim()), *x.shape[1:])

        return Hash.apply(aligned(key, in_dims[0]), aligned(data, in_dims[1]), purpose), 0


class Words(_OfIntegers):
    """`words` under every transform."""

    @staticmethod
    def forward(key: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp_random.words.default(key, count, purpose)
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: torch.Tensor, count: int, purpose: int
    ) -> tuple[torch.Tensor, Any]:
        return Words.apply(key.movedim(in_dims[0], 0), count, purpose), 0
