"""Shapes that change in place, of tensors that share memory with views and are differentiated: right, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import ALL_SAMPLES, some
from torch import Tensor

import fdp

WEIGHTS = torch.arange(1.0, 17.0)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[:]": lambda h: h[:],
    "[0]": lambda h: h[0],
    "[:, 1:3]": lambda h: h[:, 1:3],
    "t": lambda h: h.t(),
    "view": lambda h: h.view(16),
    "diagonal": lambda h: h.diagonal(),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": lambda h: h.t_(),
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "transpose_": lambda h: h.transpose_(0, -1),
    "as_strided_": lambda h: h.as_strided_((2, 2), (1, 2)),
    "squeeze_": lambda h: h.squeeze_(),
}


def number(x: Tensor) -> Tensor:
    return (x * WEIGHTS[: x.numel()].view(x.shape)).sum()


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda h, k: number(k),
    "base": lambda h, k: number(h),
    "both": lambda h, k: number(h) + 2 * number(k),
    "view is written, base": lambda h, k: (k.mul_(2), number(h))[1],
    "base is written, both": lambda h, k: (h.mul_(2), number(h) + number(k))[1],
}


def is_right(change: str, view: str, use: str, changes_base: bool) -> bool | None:
    """Whether the derivative is that of plain PyTorch; None where either is refused."""

    def loss(p: Tensor) -> Tensor:
        h = p * 2.0
        k = VIEWS[view](h)
        CHANGES[change](h if changes_base else k)
        return USES[use](h, k)

    start = torch.ones(4, 4)
    try:
        [expected] = torch.autograd.grad(loss(at := start.clone().requires_grad_()), at)
        step = fdp.data_parallel(lambda state, x: fdp.grad(loss)(state), check_trace=False)
        return torch.equal(step(start, torch.zeros(1)), expected)
    except (RuntimeError, fdp.TraceError):  # of autograd, which finds no shape that it can follow, or of fdp
        return None


@pytest.mark.parametrize("changes_base", [True, False], ids=["of the base", "of the view"])
@pytest.mark.parametrize("change", some(CHANGES, every=len(CHANGES)))
def test_a_derivative_is_that_of_plain_torch_or_refused(change: str, changes_base: bool) -> None:
    """Without the comparison, which looks at the first call alone."""
    views = list(VIEWS) if ALL_SAMPLES else list(VIEWS)[1::2]
    found = {pair: is_right(change, *pair, changes_base) for pair in itertools.product(views, USES)}
    assert [pair for pair, right in found.items() if right is False] == []
    if changes_base:
        assert all(found[view, "base"] for view in views if view != "diagonal")  # nothing reads the view
    else:
        assert all(found[view, "base"] for view in views)


def step_of(loss: Callable[[Tensor], Tensor]) -> Any:
    return fdp.data_parallel(lambda state, x: fdp.grad(loss)(state))


def turned_beside_a_view(p: Tensor) -> Tensor:
    h = p * 2.0
    k = h[:]
    h.t_()
    return number(k)


def turned_alone(p: Tensor) -> Tensor:
    h = p * 2.0
    h.t_()
    h.mul_(3)
    x = (p * 1)[0]
    x.unsqueeze_(0)
    return number(h) + number(x) + p.sum()


def test_the_error_names_the_line_and_what_to_write() -> None:
    with pytest.raises(fdp.TraceError, match=r"(?s)shares memory with a view.*in turned_beside_a_view.*h = h\.t\(\)"):
        step_of(turned_beside_a_view)(torch.ones(4, 4), torch.zeros(1))


def test_what_shares_its_memory_with_nothing_that_is_used_may_be_turned() -> None:
    p = torch.arange(16.0).reshape(4, 4)
    [expected] = torch.autograd.grad(turned_alone(at := p.clone().requires_grad_()), at)
    assert torch.equal(step_of(turned_alone)(p, torch.zeros(1)), expected)
