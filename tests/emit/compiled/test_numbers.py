"""Numbers beside sixteen bits: constants, numbers read from tensors, and tensors without dimensions, as eager takes
them, to the last bit."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import exhaustive, few, some
from torch import Tensor

import fdp
from fdp.emit.compiled.corrections import CORRECTIONS
from fdp.emit.compiled.numbers import NUMBERS
from fdp.pytorch.parts import release

NARROW = (torch.bfloat16, torch.float16)
Operator = Callable[[Tensor, Tensor, Any], Tensor]

OF_ANY: Mapping[str, Operator] = {
    "mul": lambda x, y, n: x * n,
    "product with one first": lambda x, y, n: n * x,
    "div": lambda x, y, n: x / n,
    "divided": lambda x, y, n: n / x,
    "add": lambda x, y, n: x + n,
    "sub": lambda x, y, n: x - n,
    "rsub": lambda x, y, n: n - x,
    "remainder": lambda x, y, n: x % n,
    "remainder by x": lambda x, y, n: torch.remainder(n, x),
    "floor": lambda x, y, n: x // n,
    "fmod": lambda x, y, n: torch.fmod(x, n),
    "power": lambda x, y, n: x.abs() ** n,
    "power of it": lambda x, y, n: n**x,
    "greater": lambda x, y, n: x > n,
    "where": lambda x, y, n: torch.where(x > 0, x, n),
    "in place": lambda x, y, n: x.clone().mul_(n),
    "list": lambda x, y, n: torch._foreach_mul([x, y], n)[0],
    "chain": lambda x, y, n: ((x * n) * n + n) / n,
}
"""Operators that also take a tensor without dimensions."""

OF_NUMBERS: Mapping[str, Operator] = {
    **OF_ANY,
    "lerp": lambda x, y, n: torch.lerp(x, y, n),
    "addcmul": lambda x, y, n: torch.addcmul(x, x, y, value=n),
    "addcdiv": lambda x, y, n: torch.addcdiv(x, x, y, value=n),
    "add with alpha": lambda x, y, n: torch.add(x, y, alpha=n),
    # The kernels of torch 2.14 and 2.15 round the number.
    **({} if release(torch.__version__) >= (2, 14) else {"softshrink": lambda x, y, n: F.softshrink(x, abs(n))}),
    "leaky relu": lambda x, y, n: F.leaky_relu(x, n),
    "softplus": lambda x, y, n: F.softplus(x, beta=n),
    "sum of lists": lambda x, y, n: torch._foreach_add([x], [y], alpha=n)[0],
    "list plus": lambda x, y, n: torch._foreach_add([x], n)[0],
    "list divided": lambda x, y, n: torch._foreach_div([x, y], n)[0],
    "list of powers": lambda x, y, n: torch._foreach_pow([x.abs()], n)[0],
    "gradient of leaky relu": lambda x, y, n: fdp.grad(lambda z: (F.leaky_relu(z, n) * y).float().sum())(x),
    "gradient of elu": lambda x, y, n: fdp.grad(lambda z: (F.elu(z, n) * y).float().sum())(x),
}

OF_CONSTANTS: Mapping[str, Operator] = {
    **OF_NUMBERS,
    "sub with alpha": lambda x, y, n: torch.sub(x, y, alpha=n),
    "rsub with alpha": lambda x, y, n: torch.rsub(x, n, alpha=3) + torch.rsub(y, 2, alpha=n),
    "full": lambda x, y, n: torch.full_like(x, n) * y,
    "filled": lambda x, y, n: x.clone().fill_(n) * y,
    "scalar": lambda x, y, n: torch.scalar_tensor(n, dtype=x.dtype) * y,
    "cast": lambda x, y, n: torch.full((64,), n).to(x.dtype).float() * y.float(),
    "ones": lambda x, y, n: torch.ones_like(x) * n * y,
    "hardtanh": lambda x, y, n: F.hardtanh(x, -n, n) * y,
}


@pytest.mark.parametrize("operator", sorted({**NUMBERS, **CORRECTIONS}, key=str), ids=str)
def test_corrections_take_all_arguments(operator: Any) -> None:
    taken = inspect.signature({**NUMBERS, **CORRECTIONS}[operator])
    by_place = [each for each in operator._schema.arguments if not each.kwarg_only]
    by_name = {each.name: None for each in operator._schema.arguments if each.kwarg_only}
    needed = sum(not each.has_default_value() for each in by_place)
    for count in range(needed, len(by_place) + 1):
        taken.bind(*by_place[:count], **by_name)


def compared(operators: Mapping[str, Operator], number: Any, read: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
    def step(state: Tensor, x: Tensor, y: Tensor) -> Any:
        return state, [of(x, y, read(state)) for of in operators.values()]

    drawn = torch.Generator().manual_seed(3)
    x, y = (torch.randn(64, generator=drawn).to(dtype) for _ in range(2))
    state = torch.tensor(number, dtype=torch.float64)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(state, x, y)[1]
    due = step(state, x, y)[1]
    wrong = [name for name, one, two in zip(operators, found, due, strict=True) if one.dtype != two.dtype]
    wrong += [
        f"{name}: {int((one != two).sum())} of {one.numel()} differ"
        for name, one, two in zip(operators, found, due, strict=True)
        if not torch.equal(one.nan_to_num(7), two.nan_to_num(7))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(("dtype", "number"), some(itertools.product(NARROW, [0.1, 1.7]), 4))
def test_constants_meet_sixteen_bits_as_in_kernels(dtype: torch.dtype, number: float) -> None:
    compared(few(OF_CONSTANTS), number, lambda _: number, dtype)


@pytest.mark.parametrize("number", some([math.nan, math.inf, -math.inf], 3))
def test_constants_that_are_no_numbers_meet_sixteen_bits(number: float) -> None:
    refused = ("hardtanh", "softshrink")  # by eager
    operators = {name: of for name, of in few(OF_CONSTANTS, first=1).items() if name not in refused}
    compared(operators, number, lambda _: number, NARROW[0])


def test_extremes_of_every_dtype_are_compiled() -> None:
    def step(state: list[Tensor]) -> Any:
        return [fdp.pmax(x) for x in state], [fdp.pmin(x) for x in state]

    state = [torch.tensor([2.0, math.nan, -1.0]).to(dtype) for dtype in (*NARROW, torch.float32, torch.float64)]
    state += [torch.arange(3).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)]
    for found in fdp.data_parallel(step, compile=True)(state):
        for one, due in zip(found, state, strict=True):
            assert one.dtype == due.dtype
            torch.testing.assert_close(one, due, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", some(NARROW))
def test_numbers_that_are_read_meet_sixteen_bits_as_in_kernels(dtype: torch.dtype) -> None:
    compared(few(OF_NUMBERS, first=1), 0.1, Tensor.item, dtype)


@pytest.mark.parametrize(("dtype", "of"), some(itertools.product(NARROW, [torch.float32, torch.float64, None]), 4))
def test_tensors_without_dimensions_meet_sixteen_bits_as_in_kernels(dtype: torch.dtype, of: torch.dtype | None) -> None:
    compared(few(OF_ANY), 0.1, lambda state: state.to(of or dtype), dtype)


@pytest.mark.parametrize(("number", "dtype"), some(itertools.product([1.7, 3], [torch.float32, torch.int64]), 4))
def test_powers_by_a_number_that_is_read(dtype: torch.dtype, number: float) -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        return state, x ** state.item()

    state, x = torch.tensor(number), torch.arange(1, 9).to(dtype)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(state, x)[1]
    torch.testing.assert_close(found, step(state, x)[1])


@pytest.mark.parametrize(("number", "dtype"), some(itertools.product([1.7, 3], [torch.float32, NARROW[0]]), 4))
def test_a_number_that_is_read_is_scattered(dtype: torch.dtype, number: float) -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        n, places = state.item(), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        found = [x.scatter(0, places, n), x.clone().scatter_(0, places, n), torch.lerp(x, -x, n)]
        return state, found + [x.scatter(0, places, n, reduce=how) for how in ("add", "multiply")]

    state, x = torch.tensor(number), torch.arange(16.0).to(dtype).view(4, 4)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(state, x)[1]
    for one, two in zip(found, step(state, x)[1], strict=True):
        torch.testing.assert_close(one, two)


LERPS = {
    "a tensor without dimensions": lambda x, y, w: torch.lerp(x, y, w),
    "nothing with dimensions": lambda x, y, w: torch.lerp(x[0], y[1], w),
    "a start without dimensions": lambda x, y, w: torch.lerp(x[0], y, w),
    "its own dtype": lambda x, y, w: torch.lerp(x, y, y),
    "rsub of a whole number that wraps": lambda x, y, w: torch.rsub(torch.arange(5, dtype=torch.uint8), 300, alpha=2),
    "rsub of whole numbers": lambda x, y, w: torch.rsub(torch.arange(5), 3, alpha=2),
}


@pytest.mark.parametrize("dtype", some(NARROW))
def test_numbers_between_tensors_of_sixteen_bits(dtype: torch.dtype) -> None:
    def step(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return w, [of(x, y, w) for of in LERPS.values()]

    drawn = torch.Generator().manual_seed(3)
    x, y = (torch.randn(64, generator=drawn).to(dtype) for _ in range(2))
    w = torch.tensor(0.1)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(w, x, y)[1]
    for name, one, two in zip(LERPS, found, step(w, x, y)[1], strict=True):
        digits = 0 if one.dtype != torch.float32 else 1e-6
        torch.testing.assert_close(one, two, rtol=digits, atol=digits, msg=name)


@exhaustive
@pytest.mark.parametrize("dtype", NARROW)
def test_whole_numbers_that_are_read_meet_sixteen_bits(dtype: torch.dtype) -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        n = state.item()
        return state, [x * n, x / n, n / x, x + n, n - x, x % n, torch.fmod(x, n), x.clamp(max=n), x * (n * 0.1)]

    state, x = torch.tensor(3), torch.linspace(-2, 2, 64).to(dtype)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(state, x)[1]
    for one, two in zip(found, step(state, x)[1], strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)


def test_whole_numbers_between_numbers_that_are_read_become_fractions() -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        bound = state.item()
        return state, [x.clamp(min=bound), x.clamp(max=bound), x.clamp(-bound, bound), x.double().clamp(min=bound)]

    state, x = torch.tensor(0.25), torch.arange(-3, 5)
    found = fdp.data_parallel(step, compile=True, check_replication=False, check_trace=False)(state, x)[1]
    for one, two in zip(found, step(state, x)[1], strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
