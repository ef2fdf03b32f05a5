"""Random numbers as pure functions of a key, in the way of JAX: equal on every rank if the key is.

A key is a 0-dim int64 tensor, so it can be an argument of a step, live in its state, and be saved with it. A draw is a
hash of the key and of each element's index: to a trace it is arithmetic like any other. So it is replicated where the
key is, differs from rank to rank where a rank is folded in, and works under `vmap`, in compiled steps and on every
device; and uses no generator of torch.

References:
    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011): numbers by counter instead of by state.
    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014): the hash, in `hashing`.
    JAX, `jax.random`: the interface.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch

from fdp.errors import ArgumentError, build_message
from fdp.random.hashing import mixed, signed, words
from fdp.tracebacks import hiding_frames

__all__ = ["bernoulli", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]


# One number for each purpose, so that a key's draws, its children and what is folded into it have no number in common:
# the fractions of the square roots of 2, 3, 5 and 7.
_DRAW, _SPLIT, _FOLD, _KEY = map(
    signed, (0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1)
)
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""How many bits of a word make a floating-point number: those that its significand can hold."""
_LARGEST_SPAN = 2**40

Device: TypeAlias = "torch.device | str | int | None"
"""What torch takes for a device; None where another argument says which."""


@hiding_frames
def key(seed: int | torch.Tensor, device: Device = None) -> torch.Tensor:
    """Make a key from a number.

    Args:
        seed: any Python integer, of which the lowest 64 bits count; or a 0-dim integer tensor.
        device: where the key, and by default what is drawn with it, lies; None for that of a tensor, and for torch's
            default device for a number.

    Returns:
        A 0-dim int64 tensor; another one for each of the 2**64 seeds.

    Raises:
        ArgumentError: the seed is no integer.

    Example:
        >>> first, second = split(key(0))
        >>> torch.equal(normal(first, (2, 3)), normal(first, (2, 3)))
        True
        >>> torch.equal(normal(first, (2, 3)), normal(second, (2, 3)))
        False
    """
    number = _integer("key", seed, device)
    return mixed(torch.zeros_like(number), number, _KEY)


@hiding_frames
def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """Make new keys from one, which should not be used again.

    Args:
        key: a key.
        num: how many.

    Returns:
        An int64 tensor of shape [num], to be taken apart as in `first, second = split(key)`. The first ones do not
        depend on `num`.

    Raises:
        ArgumentError: the key is none; `num` is no number of keys.

    Example:
        >>> split(key(0), 3).shape
        torch.Size([3])
    """
    _check_key("split", key)
    if not _is_number(num) or num < 0:
        raise _refusal("split", f"num={num!r}", "pass the number of keys that you need.")
    return words(key, int(num), _SPLIT)


@hiding_frames
def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """Make a new key from one and a number: a step count, or a rank.

    `fold_in(key, fdp.axis_index())` is a key of each rank's own, with which ranks draw different numbers.

    Args:
        key: a key.
        data: a Python integer, of which the lowest 64 bits count; or a 0-dim integer tensor.

    Returns:
        A key; another one for each number.

    Raises:
        ArgumentError: the key is none; the number is no integer.

    Example:
        >>> step = torch.tensor(3)
        >>> bool(fold_in(key(0), step) == fold_in(key(0), 3))
        True
    """
    _check_key("fold_in", key)
    return mixed(key, _integer("fold_in", data, key.device), _FOLD)


@hiding_frames
def normal(
    key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Draw from the normal distribution of mean 0 and standard deviation 1.

    Args:
        key: a key, to be used once.
        shape: of the result.
        dtype: floating point; None for the default dtype.
        device: of the result; None for that of the key.

    Returns:
        A tensor; equal keys, shapes and dtypes give equal numbers. In float32 none is beyond 5.5, in float64 beyond
        8.3: numbers of that many bits have no finer tails.

    Raises:
        ArgumentError: the key, the shape or the dtype is none.

    Example:
        >>> noise = normal(key(0), (1000,))
        >>> bool(noise.mean().abs() < 0.1), bool((noise.std() - 1).abs() < 0.1)
        (True, True)
    """
    dtype = _floating("normal", dtype)
    exact = dtype if dtype in (torch.float64, torch.float32) else torch.float32
    bits = _BITS[exact]
    # Odd numbers, so that neither zero nor one of the two ends is among them, and every one is exact.
    odd = 2 * _words("normal", key, shape, device, bits) + (1 - 2**bits)
    return (torch.erfinv(odd.to(exact) * 2.0**-bits) * math.sqrt(2)).to(dtype)


@hiding_frames
def uniform(
    key: torch.Tensor,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype | None = None,
    minval: float = 0.0,
    maxval: float = 1.0,
    device: Device = None,
) -> torch.Tensor:
    """Draw from the uniform distribution between two numbers.

    Args:
        key: a key, to be used once.
        shape: of the result.
        dtype: floating point; None for the default dtype.
        minval: the lower end, which is drawn as often as any other number.
        maxval: the upper end, which is never drawn.
        device: of the result; None for that of the key.

    Returns:
        A tensor of multiples of 2**-24 (float64: 2**-53, float16: 2**-11, bfloat16: 2**-8), scaled to the interval.

    Raises:
        ArgumentError: the key, the shape or the dtype is none; the interval is empty, or wider than the dtype.

    Example:
        >>> x = uniform(key(0), (1000,), minval=-1.0)
        >>> bool(x.min() >= -1), bool(x.max() < 1)
        (True, True)
    """
    dtype = _floating("uniform", dtype)
    low, high = float(minval), float(maxval)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise _refusal("uniform", f"minval={minval!r} and maxval={maxval!r}", "pass two numbers, the smaller first.")
    if max(-low, high, high - low) > torch.finfo(dtype).max:
        # What lies beyond would be infinite, and become the lower end with everything else that is rounded up.
        raise _refusal("uniform", f"minval={minval!r} and maxval={maxval!r} in {dtype}", "pass a wider dtype.")
    bits = _BITS[dtype]
    unit = _words("uniform", key, shape, device, bits).to(dtype) * 2.0**-bits
    if (low, high) == (0.0, 1.0):
        return unit
    scaled = unit * (high - low) + low
    return torch.where(scaled < high, scaled, low)  # the sum may have been rounded up to the end


@hiding_frames
def randint(
    key: torch.Tensor,
    shape: int | Sequence[int],
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
    device: Device = None,
) -> torch.Tensor:
    """Draw integers from `minval` on, up to but without `maxval`.

    Args:
        key: a key, to be used once.
        shape: of the result.
        minval: the smallest number that can be drawn.
        maxval: the smallest number above, which is not drawn.
        dtype: an integer dtype.
        device: of the result; None for that of the key.

    Returns:
        A tensor. How often numbers come differs by less than a part in a million.

    Raises:
        ArgumentError: the key, the shape or the dtype is none; the interval is empty, or holds more than 2**40
            numbers; the dtype cannot hold them.

    Example:
        >>> dice = randint(key(0), (1000,), 1, 7)
        >>> int(dice.min()), int(dice.max())
        (1, 6)
    """
    if not (_is_number(minval) and _is_number(maxval)) or not (0 < maxval - minval <= _LARGEST_SPAN):
        raise _refusal(
            "randint",
            f"minval={minval!r} and maxval={maxval!r}",
            "pass two Python integers, the smaller first, at most 2**40 apart; for ends that are tensors, scale what "
            "uniform draws.",
        )
    if not _is_integer(dtype):
        raise _refusal("randint", f"dtype={dtype}", "pass an integer dtype.")
    if minval < torch.iinfo(dtype).min or maxval - 1 > torch.iinfo(dtype).max:
        raise _refusal("randint", f"numbers from {minval} to {maxval - 1} in {dtype}", "pass a wider dtype.")
    return (_words("randint", key, shape, device, 63) % int(maxval - minval) + int(minval)).to(dtype)


@hiding_frames
def bernoulli(
    key: torch.Tensor, p: float | torch.Tensor = 0.5, shape: int | Sequence[int] | None = None, device: Device = None
) -> torch.Tensor:
    """Draw truth values.

    Args:
        key: a key, to be used once.
        p: the probability of True; a number, or a tensor that can be expanded to the shape.
        shape: of the result; None for that of `p`.
        device: of the result; None for that of `p` if that is a tensor, else that of the key.

    Returns:
        A boolean tensor.

    Raises:
        ArgumentError: the key or the shape is none; `p` is no number, or a tensor with more elements than the shape.

    Example:
        >>> kept = bernoulli(key(0), 0.9, (1000,))
        >>> bool((kept.float().mean() - 0.9).abs() < 0.05)
        True
    """
    if not isinstance(p, torch.Tensor):
        if not isinstance(p, Real):
            raise _refusal("bernoulli", f"p={p!r}", "pass a probability, or a tensor of them.")
        return uniform(key, () if shape is None else shape, torch.float32, device=device) < p
    drawn = uniform(
        key,
        tuple(p.shape) if shape is None else shape,
        torch.float64 if p.dtype == torch.float64 else torch.float32,
        device=p.device if device is None else device,
    )
    try:
        # Without it the comparison would expand what was drawn as well, and one number decide on many elements.
        p = p.expand(drawn.shape)
    except RuntimeError:
        shapes = f"p of shape {list(p.shape)} for draws of shape {list(drawn.shape)}"
        raise _refusal("bernoulli", shapes, "pass the shape of p.") from None
    return drawn < p


@hiding_frames
def permutation(key: torch.Tensor, x: int | torch.Tensor, axis: int = 0, device: Device = None) -> torch.Tensor:
    """Shuffle a tensor along one dimension, or the integers below a number.

    Args:
        key: a key, to be used once.
        x: a tensor, whose slices along `axis` stay whole; or a number n for those from 0 to n - 1.
        axis: the dimension.
        device: of the result where `x` is a number; None for that of the key.

    Returns:
        A tensor of the shape of `x`, or an int64 tensor of shape [n].

    Raises:
        ArgumentError: the key is none; `x` is neither a tensor with that dimension nor a number of elements.

    Example:
        >>> permutation(key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    if isinstance(x, torch.Tensor):
        if not -x.dim() <= axis < x.dim():
            raise _refusal(
                "permutation", f"axis={axis} of a tensor of shape {list(x.shape)}", "pass a dimension of it."
            )
        order = _words("permutation", key, x.shape[axis], x.device, 63).argsort()
        return x.index_select(axis, order)
    if not _is_number(x) or x < 0:
        raise _refusal("permutation", f"x={x!r}", "pass a tensor, or a number of elements.")
    return _words("permutation", key, x, device, 63).argsort()


def _words(name: str, key: torch.Tensor, shape: int | Sequence[int], device: Device, bits: int) -> torch.Tensor:
    """Draw the upper `bits` bits of a word for each element, as a number from 0 to 2**bits - 1."""
    _check_key(name, key)
    sizes: list[Any] = list(shape) if isinstance(shape, Sequence) else [shape]
    if not all(_is_number(size) and size >= 0 for size in sizes):
        raise _refusal(name, f"shape={shape!r}", "pass a tuple of sizes.")
    count, key = int(math.prod(sizes)), key if device is None else key.to(device)
    if bits > 31:
        drawn, unused = words(key, count, _DRAW), 64 - bits
    else:
        # Each word of 64 bits is two of 32.
        drawn, unused = words(key, -(-count // 2), _DRAW).view(torch.int32)[:count], 32 - bits
    result: torch.Tensor = (drawn.view(sizes) >> unused) & (2**bits - 1)
    return result


def _check_key(name: str, key: object) -> None:
    if isinstance(key, torch.Tensor) and key.dtype == torch.int64 and key.dim() == 0:
        return
    got = f"a {key.dtype} tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
    raise _refusal(
        name, f"{got} for a key", "pass a 0-dim int64 tensor that fdp.random.key(n) made, or one of several: keys[0]."
    )


def _integer(name: str, number: Any, device: Device) -> torch.Tensor:
    if _is_number(number):
        return torch.tensor(signed(int(number)), dtype=torch.int64, device=device)
    if isinstance(number, torch.Tensor) and number.dim() == 0 and _is_integer(number.dtype):
        return number.to(device=device, dtype=torch.int64)
    raise _refusal(name, f"{number!r}", "pass a Python integer or a 0-dim integer tensor.")


def _is_number(value: object) -> bool:
    """Whether it is a whole number, of Python's or of NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_integer(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _floating(name: str, dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in _BITS:
        raise _refusal(name, f"dtype={dtype}", "pass float64, float32, float16 or bfloat16.")
    return dtype


def _refusal(name: str, got: str, remedy: str) -> ArgumentError:
    return ArgumentError(build_message(f"fdp.random.{name} was given {got}.", remedy=remedy))
