"""Derivatives through operators that change each tensor of a list in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from samples import some

import fdp

CHANGES: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    "a product": lambda xs: torch._foreach_mul_(xs, 0.5),
    "products by tensors": lambda xs: torch._foreach_mul_(xs, [x.detach() + 1 for x in xs]),
    "a sign": torch._foreach_neg_,
    "a root": torch._foreach_sqrt_,
    "a step between": lambda xs: torch._foreach_lerp_(xs, [x.detach().flip(0) for x in xs], 0.25),
    "zeros": torch._foreach_zero_,
}


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("check", some([True, False]), ids=["checked", "unchecked"])
def test_a_view_of_what_is_changed_has_the_derivative_of_plain_pytorch(name: str, check: bool) -> None:
    """The view is made before the change, and read after it."""

    def loss(p: torch.Tensor) -> torch.Tensor:
        first, second = p * 2, p + 1
        pairs = first.unflatten(0, (2, -1))
        CHANGES[name]([first, second])
        return (pairs * pairs).sum() + (second * 3).sum()

    p = torch.arange(1.0, 5.0)
    leaf = p.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(fdp.data_parallel(lambda state: fdp.grad(loss)(state), check_trace=check)(p), expected)


def test_a_change_of_what_the_derivative_needs_is_an_error_as_in_plain_pytorch() -> None:
    def loss(p: torch.Tensor) -> torch.Tensor:
        x = p * 2
        y = x * x
        torch._foreach_mul_([x], 3.0)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fdp.data_parallel(lambda state: fdp.grad(loss)(state))(torch.ones(3))
