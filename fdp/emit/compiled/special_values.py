"""Elementwise operators that inductor computes wrongly for some values, decomposed as the kernels compute them.

A quotient is rounded down by what is left over: 1.5 / 0.3 rounds to 5, but 0.3 fits into 1.5 four times. Inductor
takes the floor of the rounded quotient, and what is left over from that of `fmod` and an addition, which makes other
numbers of infinite ones. (Seen in torch 2.13, with `torch.compile` as well.) What still differs: the sign of zeros,
numbers too small for a full mantissa, and sums whose parts overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fdp.emit.compiled.numbers import NARROW, rounded, wide

_aten = torch.ops.aten

_LARGE = 1e9
"""From this number on 1 + x * x rounds to x * x, in any dtype."""


def _operands(one: Any, other: Any, *, rounds: bool = False) -> tuple[torch.dtype, torch.Tensor, torch.Tensor] | None:
    """The dtype of a result, and the operands in the dtype that a kernel computes in; None if it is not
    floating-point.

    Args:
        one: the dividend.
        other: the divisor.
        rounds: whether kernels for CPUs round numbers to sixteen bits beside such a tensor; see `numbers`.
    """
    dtype = torch.result_type(one, other)
    if not dtype.is_floating_point:
        return None
    within = torch.float32 if dtype in NARROW else dtype
    device = one.device if isinstance(one, torch.Tensor) and one.dim() else getattr(other, "device", None)
    device = one.device if device is None else device

    def operand(value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            # Kernels take a whole number of many digits for one of sixteen bits first.
            return (value.to(dtype) if value.dim() or rounds else value).to(device, within)
        now = rounded(value, dtype, device) if rounds else value
        return now.to(within) if isinstance(now, torch.Tensor) else torch.full([], now, dtype=within, device=device)

    return dtype, operand(one), operand(other)


def _fmod(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The remainder of C's `fmod`, and where its sign differs from the divisor's."""
    rest = _aten.fmod.Tensor(one, other)
    return rest, (rest != 0) & ((other < 0) != (rest < 0))


def _remainder(one: Any, other: Any) -> Any:
    if (operands := _operands(one, other, rounds=True)) is None:
        return NotImplemented
    dtype, one, other = operands
    rest, across = _fmod(one, other)
    return torch.where(across, rest + other, rest).to(dtype)


def _floor_divide(one: Any, other: Any, *, rounding_mode: str | None = "floor") -> Any:
    """A quotient that is rounded down, or of sixteen bits also cut off: kernels round that of two tensors before."""
    if rounding_mode is None or (operands := _operands(one, other)) is None:
        return NotImplemented
    is_number = not isinstance(other, torch.Tensor) or (other.dim() == 0 and other.device.type == "cpu")
    dtype, one, other = operands
    if rounding_mode == "trunc":
        whole = one / other
        return (whole if is_number else whole.to(dtype)).trunc().to(dtype) if dtype in NARROW else NotImplemented
    rest, across = _fmod(one, other)
    whole = one / other
    # Of a quotient that overflows, some kernels' `fmod` leaves no number over.
    overflows = (whole.abs() == math.inf) & (one.abs() != math.inf)
    quotient = torch.where(overflows, one, one - rest) / other
    quotient = torch.where(across, quotient - 1, quotient)
    down = quotient.floor()
    down = torch.where(quotient - down > 0.5, down + 1, down)
    down = torch.where(quotient != 0, down, _aten.copysign.Tensor(torch.zeros_like(whole), whole))
    return torch.where(other == 0, whole, down).to(dtype)


def _inverse_root(x: Any, exponent: Any) -> Any:
    """The inverse of a root: `x ** -0.5` is that where operators run one by one, also of minus zero and infinity.

    The kernel of CPUs for float16 takes a power.
    """
    is_power = x.dtype == torch.float16 and x.device.type == "cpu"
    return _aten.rsqrt.default(x) if exponent == -0.5 and x.is_floating_point() and not is_power else NotImplemented


def _acosh(x: Any) -> Any:
    """Inductor squares the number, which overflows."""
    if not x.is_floating_point():
        return NotImplemented
    known = wide(x)
    large = known > _LARGE
    some = torch.where(large, 2.0, known)
    near = some.log() + (((some - 1) / some).sqrt() * ((some + 1) / some).sqrt()).log1p()
    return torch.where(large, known.log() + math.log(2), near).to(x.dtype)


KERNEL_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode, _aten.floor_divide.default), _floor_divide),
    **dict.fromkeys((_aten.remainder.Tensor, _aten.remainder.Scalar, _aten.remainder.Scalar_Tensor), _remainder),
    _aten.pow.Tensor_Scalar: _inverse_root,
    _aten.acosh.default: _acosh,
}
"""Decompositions that compute as kernels do; `NotImplemented` where inductor is right."""
