"""Operators of two dtypes, or whose result has another one than inductor takes it for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from fdp.pytorch.parts import release

U8 = torch.tensor([0, 1, 2, 33, 100, 200, 255], dtype=torch.uint8)
I8 = torch.tensor([-100, 127, 100, -3, 7, 5, 0], dtype=torch.int8)
TENTH = torch.full((7,), 0.1, dtype=torch.bfloat16)
HALF = torch.tensor(3.3, dtype=torch.float16)

TIMES_COMPLEX: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "times a complex scalar": lambda u, i, h: u.bfloat16() * torch.complex(h.float(), h.float()),
    "times a complex number": lambda u, i, h: u.bfloat16() * (1 + 2j),
}

OPERATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum of two dtypes with alpha": lambda u, i, h: torch.add(u, i, alpha=2),
    "difference of two dtypes with alpha": lambda u, i, h: torch.sub(i, u, alpha=3),
    "sum with alpha and bool": lambda u, i, h: torch.add(u, i > 0, alpha=2),
    "sum of a scalar with alpha": lambda u, i, h: torch.add(h.float(), u, alpha=2),
    "sum of bool with alpha": lambda u, i, h: torch.add(u > 9, i > 0, alpha=2),
    "nothing of bool added": lambda u, i, h: torch.add(u > 9, i > 0, alpha=0),
    "sum of sixteen bits and a wide number with alpha": lambda u, i, h: torch.add(u.half(), h.double(), alpha=2),
    "scalar of sixteen bits times a wider one": lambda u, i, h: h * TENTH[0].float(),
    "scalar of sixteen bits by a wider one": lambda u, i, h: h / TENTH[0].double(),
    "of the other sixteen bits": lambda u, i, h: u.bfloat16() * h,
    "addcmul of two dtypes": lambda u, i, h: (
        torch.addcmul(u.half(), i.float(), i.float(), value=0.1).dtype.itemsize + u
    ),
    "soft margin": lambda u, i, h: torch.nn.functional.soft_margin_loss(i.half(), i.half().sign(), reduction="none"),
    # Of bfloat16 torch 2.14 and 2.15 make complex numbers of sixteen bits each, which few operators take.
    **({} if release(torch.__version__) >= (2, 14) else TIMES_COMPLEX),
    "any of bytes": lambda u, i, h: u.any(),
    "any of rows of bytes": lambda u, i, h: torch.stack([u, u * 0]).any(1, keepdim=True),
    "any of dims of bytes": lambda u, i, h: torch.any(u[None], dim=(0, 1)),
    "all of bytes": lambda u, i, h: u.all(),
    "quotient cut off": lambda u, i, h: torch.div(u, h, rounding_mode="trunc"),
    "quotient of many cut off": lambda u, i, h: torch.div(u, (i / 7).bfloat16(), rounding_mode="trunc"),
    "quotient of nearly 30 cut off": lambda u, i, h: torch.div(
        u - u + 3, u.bfloat16() * 0 + 0.1, rounding_mode="trunc"
    ),
    "quotient by a constant cut off": lambda u, i, h: torch.div(u.bfloat16(), 0.1, rounding_mode="trunc"),
    "mean of nothing": lambda u, i, h: torch.var_mean(u[:0].float())[1].nan_to_num(7),
    "means of nothing": lambda u, i, h: torch.std_mean(u[:0].float().view(0, 2), 0, keepdim=True)[1].nan_to_num(7),
    "lerp of whole numbers": lambda u, i, h: torch.lerp(u, u * 2, h),
}


@pytest.mark.filterwarnings("ignore:.*(degrees of freedom|complex operators|are mixed in)")
def test_results_have_the_dtypes_and_values_of_eager() -> None:
    def step(state: Tensor, u: Tensor, i: Tensor, h: Tensor) -> Any:
        return state, [of(u, i, h) for of in OPERATORS.values()]

    given = (torch.zeros(()), U8, I8, HALF)
    found = fdp.data_parallel(step, compile=True, check_replication=False, check_trace=False)(*given)[1]
    for name, one, two in zip(OPERATORS, found, step(*given)[1], strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two), (name, one, two)
