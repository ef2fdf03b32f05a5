"""Numbers beside tensors of sixteen bits, as torch's kernels take them.

Kernels compute with such tensors in float32, and with the number as it is: a Python number, one that is read from a
tensor, or a tensor without dimensions on a CPU as the second operand. Inductor rounds the last two to sixteen bits. On
a CPU the kernels of sums, powers and remainders round any number first, and inductor does not: of `x % 0.1` hardly an
element is the same then. (Seen in torch 2.13 to 2.15, with `torch.compile` as well.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten

NARROW = (torch.float16, torch.bfloat16)


def rounded(number: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A number as kernels that round it take it.

    Args:
        number: a Python number, or one that is read from a tensor at each call.
        dtype: of the tensor beside it.
        device: of the tensor beside it.

    Returns:
        The nearest number of the dtype, if kernels of the device round; a tensor without dimensions for a number that
        is known at each call only.
    """
    if device.type != "cpu" or dtype not in NARROW:
        return number
    if isinstance(number, torch.SymFloat):
        return _aten.scalar_tensor.default(number, dtype=dtype, device=device)
    return nearest(float(number), dtype) if isinstance(number, int | float) else number


def nearest(number: float, dtype: torch.dtype) -> float:
    """The nearest number that a floating-point dtype has; one of sixteen bits is that of the nearest float32.

    Example:
        >>> nearest(0.1, torch.bfloat16), nearest(1e5, torch.float16)
        (0.10009765625, inf)
    """
    if number == 0 or not math.isfinite(number) or torch.finfo(dtype).bits < 16:
        return number
    if dtype in NARROW:
        number = nearest(number, torch.float32)
        if math.isinf(number):
            return number
    info = torch.finfo(dtype)
    step = info.eps * max(2.0 ** (math.frexp(number)[1] - 1), info.smallest_normal)
    rounded = round(number / step) * step
    return math.copysign(rounded if abs(rounded) <= info.max else math.inf, number)


def _has(number: float, dtype: torch.dtype) -> bool:
    """Whether a number is one of a floating-point dtype. NaN is, though it does not equal itself."""
    return math.isnan(number) or nearest(number, dtype) == number


def _has_more_digits(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number, or a tensor without dimensions on a CPU, may be one that the dtype has not."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu" and value.dtype != dtype
    return isinstance(value, torch.SymFloat) or (isinstance(value, float) and not _has(value, dtype))


def _result(one: Any, other: Any) -> torch.dtype:
    """The dtype of what is computed from both. Of a number that is known at each call only nothing can be asked."""
    known = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}
    return torch.result_type(*(known.get(type(each), each) for each in (one, other)))


def wide(value: Any) -> Any:
    """A tensor of sixteen bits in float32, in which kernels compute with it; anything else as it is."""
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in NARROW else value


def _exact(operator: Any) -> Callable[..., Any]:
    """An operator whose kernels take numbers as they are: products and quotients."""

    def computed(one: Any, other: Any) -> Any:
        dtype = _result(one, other)
        if dtype not in NARROW or not _has_more_digits(other, dtype):
            return NotImplemented
        return operator(wide(one), wide(other)).to(dtype)

    return computed


def _number_rounded(operator: Any, of_tensors: Any) -> Callable[..., Any]:
    """An operator of a tensor and a number, whose kernels for CPUs round the number first.

    Args:
        operator: one argument is a tensor, the other one a number.
        of_tensors: the same with two tensors.
    """

    def computed(one: Any, other: Any, **named: Any) -> Any:
        tensor, number = (one, other) if isinstance(one, torch.Tensor) else (other, one)
        if tensor.dtype not in NARROW or not isinstance(number, int | float | torch.SymFloat):
            return NotImplemented
        if tensor.device.type != "cpu":
            if not isinstance(number, torch.SymFloat):
                return NotImplemented
            return operator(wide(one), wide(other), **named).to(tensor.dtype)
        now = rounded(number, tensor.dtype, tensor.device)
        if isinstance(now, float) and (now == number or math.isnan(now)):
            return NotImplemented
        made = of_tensors if isinstance(now, torch.Tensor) else operator
        return made(tensor, now, **named) if tensor is one else made(now, tensor, **named)

    return computed


def _sum(operator: Any) -> Callable[..., Any]:
    """`add` and `sub` with `alpha`, in which only one result is rounded, or as a product and a sum.

    Inductor fuses the sum with a matrix product, and forgets `alpha` (`addmm` in its pass behind the backward pass;
    seen in torch 2.13, with `torch.compile` as well). Of a factor that is known at each call only, nothing can be
    asked here.
    """
    of_number = _number_rounded(operator, operator)

    def total(one: Any, other: Any, *, alpha: Any = 1) -> Any:
        if isinstance(alpha, int | float) and alpha == 1:
            return of_number(one, other)
        if not isinstance(other, torch.Tensor):
            return operator(one, _aten.mul.Tensor(other, alpha))
        dtype = _result(one, other)
        if dtype not in NARROW:
            return operator(one, _aten.mul.Tensor(other.to(dtype), alpha).to(dtype))
        one, other = (wide(each.to(dtype)) for each in (one, other))
        return operator(one, _aten.mul.Tensor(other, wide(rounded(alpha, dtype, other.device)))).to(dtype)

    return total


def _rsub(x: torch.Tensor, number: Any, alpha: Any = 1) -> Any:
    """A number less a tensor, which may be multiplied before."""
    if isinstance(alpha, int | float) and alpha == 1:
        return _rsub_rounded(x, number)
    dtype = _result(x, number)
    if dtype in NARROW and x.device.type != "cpu":  # kernels for cards take the number as it is
        known: Any = _aten.scalar_tensor.default(number, dtype=torch.float32, device=x.device)
        return _aten.sub.Tensor(known, _aten.mul.Tensor(wide(x.to(dtype)), alpha)).to(dtype)
    # A whole number that the dtype has not wraps.
    made = dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
    known = _aten.scalar_tensor.default(number, dtype=made, device=x.device).to(dtype)
    return _less(known, x, alpha=alpha)


_rsub_rounded = _number_rounded(_aten.rsub.Scalar, _aten.rsub.Tensor)
_less = _sum(_aten.sub.Tensor)


def _power(x: torch.Tensor, exponent: Any) -> Any:
    """A power whose exponent is known at each call only, of tensors: torch asks for its value to take roots."""
    if not isinstance(exponent, torch.SymFloat | torch.SymInt):
        return _power_rounded(x, exponent)
    dtype = _result(x, exponent)
    base = wide(x.to(dtype))
    known: Any = rounded(exponent, dtype, x.device)
    if not isinstance(known, torch.Tensor):
        known = torch.scalar_tensor(known, dtype=base.dtype, device=x.device)
    return _aten.pow.Tensor_Tensor(base, wide(known)).to(dtype)


_power_rounded = _number_rounded(_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor)


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    """`lerp` by a number, in float32.

    Of one that is known at each call only, as of Adafactor, torch asks on which side of a half it is.
    """
    dtype = start.dtype
    is_read = isinstance(weight, torch.SymFloat | torch.SymInt)
    if not is_read and dtype not in NARROW:
        return NotImplemented
    start, end = wide(start), wide(end)
    if not is_read:
        return _aten.lerp.Scalar(start, end, weight).to(dtype)
    share: Any = _aten.scalar_tensor.default(weight, dtype=start.dtype, device=start.device)
    away = end - start
    return torch.where(share.abs() < 0.5, start + share * away, end - (1 - share) * away).to(dtype)


def _lerp_by_tensor(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> Any:
    """`lerp` by a tensor, of whole numbers by fractions or of sixteen bits.

    Inductor takes one end from the other in their own dtype, which may wrap, or round (seen in torch 2.13).
    """
    dtype = torch.result_type(start if start.dim() else end, weight)
    if start.dtype not in NARROW and (start.is_floating_point() or not weight.is_floating_point()):
        return NotImplemented
    start, end, weight = (wide(each.to(dtype)) for each in (start, end, weight))
    return _aten.lerp.Tensor(start, end, weight).to(dtype)


def _fused(operator: Any) -> Callable[..., Any]:
    """An operator of several operations with numbers, in float32."""

    def computed(*given: Any, **named: Any) -> Any:
        dtype = given[0].dtype
        if any(isinstance(each, torch.Tensor) and each.dtype != dtype for each in given):
            return NotImplemented
        numbers = [each for each in (*given, *named.values()) if not isinstance(each, torch.Tensor)]
        if dtype not in NARROW or not any(_has_more_digits(each, dtype) for each in numbers):
            return NotImplemented
        return operator(*map(wide, given), **named).to(dtype)

    return computed


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """Whole numbers between numbers that are known at each call only: inductor returns whole ones."""
    if x.is_floating_point() or not any(isinstance(each, torch.SymFloat) for each in (low, high)):
        return NotImplemented
    return _aten.clamp.default(x.to(torch.get_default_dtype()), low, high)


def _of_each(operator: Any) -> Callable[..., Any]:
    """An operator of a list and a number, or of as many, one by one if there are sixteen bits."""

    def computed(many: Sequence[Any], number: Any) -> Any:
        if all(each.dtype not in NARROW for each in many):
            return NotImplemented
        numbers = number if isinstance(number, list | tuple) else [number] * len(many)
        return [operator(each, its) for each, its in zip(many, numbers, strict=True)]

    return computed


def _sum_of_each(operator: Any) -> Callable[..., Any]:
    """Sums of two lists with `alpha`, one by one if there are sixteen bits."""

    def computed(many: Sequence[Any], others: Sequence[Any], *, alpha: Any = 1) -> Any:
        is_one = isinstance(alpha, int | float) and alpha == 1
        if is_one or all(each.dtype not in NARROW for each in many):
            return NotImplemented
        return [operator(one, two, alpha=alpha) for one, two in zip(many, others, strict=True)]

    return computed


def _tensor_of(number: Any, **how: Any) -> Any:
    """A tensor of one number, which has the digits of its dtype."""
    dtype = how.get("dtype")
    if dtype not in NARROW or not isinstance(number, float) or _has(number, dtype):
        return NotImplemented
    return _aten.scalar_tensor.default(nearest(number, dtype), **how)


def _scattered(of_tensor: Any) -> Callable[..., Any]:
    """A number scattered into a tensor: one that is known at each call only inductor cannot lower (torch 2.13).

    Args:
        of_tensor: the same with a tensor; the names of reductions are those of `scatter_reduce`.
    """

    def scattered(x: torch.Tensor, dim: int, index: torch.Tensor, number: Any, **how: Any) -> Any:
        if not isinstance(number, torch.SymFloat | torch.SymInt):
            return NotImplemented
        source: Any = _aten.scalar_tensor.default(number, dtype=x.dtype, device=x.device)
        reductions = [{"add": "sum", "multiply": "prod"}[each] for each in how.values()]
        return of_tensor(x, dim, index, source.expand(index.shape), *reductions)

    return scattered


_SUMS = {_aten.add.Tensor: "add", _aten.sub.Tensor: "sub"}
_OF_NUMBERS = {_aten.mul.Tensor: "mul", _aten.div.Tensor: "div", _aten.pow.Tensor_Scalar: "pow", **_SUMS}

NUMBERS: Mapping[Any, Callable[..., Any]] = {
    **{operator: _sum(operator) for operator in _SUMS},
    **{operator: _exact(operator) for operator in (_aten.mul.Tensor, _aten.div.Tensor)},
    **{
        operator: _fused(operator)
        for operator in (
            _aten.addcmul.default,
            _aten.addcdiv.default,
            _aten.softshrink.default,
            _aten.leaky_relu_backward.default,
            _aten.elu_backward.default,
        )
    },
    _aten.clamp.default: _clamp,
    _aten.scalar_tensor.default: _tensor_of,
    _aten.scatter.value: _scattered(_aten.scatter.src),
    _aten.scatter_.value: _scattered(_aten.scatter_.src),
    _aten.scatter.value_reduce: _scattered(_aten.scatter_reduce.two),
    _aten.scatter_.value_reduce: _scattered(_aten.scatter_reduce_.two),
    _aten.rsub.Scalar: _rsub,
    _aten.fmod.Scalar: _number_rounded(_aten.fmod.Scalar, _aten.fmod.Tensor),
    _aten.pow.Scalar: _number_rounded(_aten.pow.Scalar, _aten.pow.Tensor_Tensor),
    _aten.pow.Tensor_Scalar: _power,
    _aten.lerp.Scalar: _lerp,
    _aten.lerp.Tensor: _lerp_by_tensor,
    **{
        getattr(getattr(_aten, f"_foreach_{name}"), overload): _of_each(operator)
        for operator, name in _OF_NUMBERS.items()
        for overload in ("Scalar", "ScalarList")
    },
    **{getattr(_aten, f"_foreach_{name}").List: _sum_of_each(operator) for operator, name in _SUMS.items()},
}
"""Decompositions that take numbers as kernels do; `NotImplemented` where inductor does."""
