"""Elementwise operators on zeros, infinities, NaN, and very large and small numbers, compiled and one by one.

Signs of zeros and numbers too small for a full mantissa are not compared: a compiler may lose them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import ALL_SAMPLES, exhaustive, some
from torch import Tensor
from torch.nn import functional as F

import fdp


def _names(text: str) -> list[str]:
    return text.split()


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in _names("""
    acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac isfinite isinf isnan lgamma log
    log10 log1p log2 logit nan_to_num reciprocal relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh
    trunc
    """)
} | {
    name: getattr(F, name)
    for name in _names("""
    elu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish selu silu softplus softsign tanhshrink
    """)
}
SCALAR: dict[str, Callable[[Tensor, float], Tensor]] = {
    "div, floor": lambda x, c: torch.div(x, c, rounding_mode="floor"),
    "div, trunc": lambda x, c: torch.div(x, c, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod, "pow": torch.pow,
    "xlogy": torch.xlogy, "number // x": lambda x, c: c // x, "number % x": lambda x, c: torch.remainder(c, x),
    "number ** x": lambda x, c: torch.pow(c, x),
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in _names("atan2 copysign div floor_divide fmod fmax hypot logaddexp maximum pow remainder xlogy")
} | {
    "div, floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div, trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
Results = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
CONSTANTS = (0.3, -2.0, -0.5, math.inf)


def special(dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    ordinary = [0.0, 1.0, 0.25, 0.3, 0.5, 1.5, 2.5, 7.0, 100.0, 30000.0]
    values = [*ordinary, math.inf, limits.tiny, limits.max, limits.max / 2, limits.eps]
    return torch.tensor([*values, *(-x for x in values), math.nan], dtype=torch.float64).to(dtype)


def of_one(x: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {name: operator(x) for name, operator in UNARY.items()}


def with_constants(x: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """A constant that sixteen bits cannot hold is rounded by some kernels, and not by others."""
    exact = [c for c in CONSTANTS if x.dtype.itemsize > 2 or c != 0.3]
    return {f"{name}, {c}": operator(x, c) for name, operator in SCALAR.items() for c in exact}


def of_two(x: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {name: operator(a, b) for name, operator in BINARY.items()}


def compared(value: Tensor) -> Tensor:
    value = value.double() + 0.0
    return torch.where(value.abs() < 1e-37, 0.0, value)


@pytest.mark.parametrize("dtype", [torch.float32, *(torch.float64, torch.bfloat16)[: 2 * ALL_SAMPLES]])
@pytest.mark.parametrize("results", some([of_two, with_constants, of_one], 3))
def test_special_values_are_as_without_compilation(results: Results, dtype: torch.dtype) -> None:
    x = special(dtype)
    if results is not of_one:  # of a very large quotient `fmod` is NaN in vectors, and is not behind the last whole one
        x = torch.where(x.isfinite() & (x.abs() > 1e30), 1.0, x)
    arguments = x.repeat(5), x.repeat(len(x)), x.repeat_interleave(len(x))  # as long as vectors and more
    step = fdp.data_parallel(results, compile=True, check_trace=False, check_replication=False)
    found, wrong = step(*arguments), {}
    for name, due in results(*arguments).items():
        one, two = compared(found[name]), compared(due)
        eps = torch.finfo(dtype).eps
        # Near zero inductor's erf is as exact as near one.
        near = torch.isclose(one, two, rtol=64 * eps, atol=2 * eps if name == "erf" else 0.0, equal_nan=True)
        if not near.all():
            at = int((~near).nonzero()[0])
            given = arguments[1:] if results is of_two else arguments[:1]
            wrong[name] = f"of {[each[at].item() for each in given]}: {one[at].item()}, not {two[at].item()}"
    assert not wrong, "\n".join(f"{name} {how}" for name, how in wrong.items())


def down(x: Tensor, y: Tensor) -> Any:
    return x // 3, -x % 7, torch.div(x, y, rounding_mode="floor"), torch.remainder(x, y), x.double() // 0.3


@exhaustive
def test_whole_numbers_are_divided_down_as_ever() -> None:
    x, y = torch.arange(-20, 21), torch.tensor([3, -3]).repeat(21)[:41]
    found = fdp.data_parallel(down, compile=True, check_replication=False)(x, y)
    for one, two in zip(found, down(x, y), strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)


def with_whole_numbers(n: Tensor, x: Tensor) -> Any:
    return n % x, n.int() % x, torch.div(n, x, rounding_mode="floor"), x**-0.5


@exhaustive
def test_sixteen_bits_hold_no_long_whole_numbers() -> None:
    n, x = torch.tensor([2049, -4099, 70001, 3, 257, 1]), torch.tensor([2.0, 7.0, 7.0, -0.0, -math.inf, 4.0])
    step = fdp.data_parallel(with_whole_numbers, compile=True, check_trace=False, check_replication=False)
    for one, two in zip(step(n, x.half()), with_whole_numbers(n, x.half()), strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0, equal_nan=True)
