"""A value that is compared with what was selected from it, or made of it, is computed once in a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import exhaustive

import fdp

Function = Callable[[torch.Tensor], torch.Tensor]


def numbers(seed: int) -> torch.Tensor:
    """Every other column: loops that read and loops that write them are vectorised along different dimensions."""
    return (torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1)[:, ::2]


def beside_a_product(of: Function) -> Function:
    """The gradient of a function, and of products that put it into another loop."""

    def inner(q: torch.Tensor) -> torch.Tensor:
        product = torch.mm(q, q)
        return q.sum() + (product * product).sum() * 0.25

    def loss(p: torch.Tensor) -> torch.Tensor:
        return p.sum() + (fdp.grad(inner)(p) * p).sum() + of(p) + p.mean()

    return lambda p: fdp.grad(loss)(p)


COMPARED: dict[str, Function] = {
    "amax": beside_a_product(lambda p: torch.sin(p).amax()),
    "amin of rows": beside_a_product(lambda p: torch.tanh(p).amin(1).sum()),
    "max": beside_a_product(lambda p: (torch.sin(p) * 3).max()),
    "through a view": beside_a_product(lambda p: torch.sin(p).t().reshape(-1).amax()),
    "norm": beside_a_product(lambda p: torch.linalg.vector_norm(torch.sin(p), float("inf"))),
    "scatter": beside_a_product(
        lambda p: torch.zeros(4).scatter_reduce(0, torch.tensor([0, 1, 1, 2]), torch.sin(p[0]), "amax").sum()
    ),
    "equal to the larger": lambda p: (torch.maximum(torch.sin(p), p.mm(p) * 0 - 9.0) == torch.sin(p)).double().mean(),
    "not smaller than the largest": lambda p: (torch.exp(p) >= torch.exp(p).amax(1, keepdim=True)).double() + p.mm(p),
    "not below the second": lambda p: (torch.tanh(p) >= torch.tanh(p).topk(2).values[:, 1:]).double() + p.mm(p),
}
CHEAPEST = "equal to the larger"  # The gradients with products are several kernels each.


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == CHEAPEST else exhaustive) for x in COMPARED])
def test_it_is_what_it_is_without_the_compiler(name: str) -> None:
    function = COMPARED[name]
    for checked in (False, True):
        step = fdp.data_parallel(lambda p: fdp.per_rank(function(p)), compile=True, check_trace=checked)
        for seed in range(8):
            torch.testing.assert_close(step(numbers(seed)), function(numbers(seed)), rtol=1e-4, atol=1e-5)


def in_a_branch(p: torch.Tensor) -> torch.Tensor:
    def chosen(p: torch.Tensor) -> torch.Tensor:
        s = torch.sin(p)
        return (s == s.amax()).float() + p.mm(p)

    return torch.cond(p.sum() > -1000, chosen, lambda p: p * 2, (p,))


@exhaustive
def test_in_a_branch() -> None:
    step = fdp.data_parallel(lambda p: fdp.per_rank(in_a_branch(p)), compile=True)
    for seed in range(8):
        torch.testing.assert_close(step(numbers(seed)), in_a_branch(numbers(seed)))


def test_what_nothing_is_compared_with_is_not_marked() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from fdp.emit.compiled.computed_once import _MARK, mark_compared

    def marked(function: Callable[..., Any], *args: torch.Tensor) -> list[str]:
        graph = make_fx(function)(*args)
        mark_compared(graph)
        return [str(node.target) for node in graph.graph.nodes if _MARK in node.meta]

    x = torch.rand(3, 3)
    assert marked(lambda x: torch.sin(x).relu().sum() + (x > x.mean()).sum(), x) == []
    assert marked(lambda x: (torch.sin(x) != torch.cos(x)).sum(), x) == []  # each is read once
    assert marked(lambda x: torch.sin(x) != torch.sin(x).amin(), x) == ["aten.sin.default"]  # one is left
    assert marked(lambda x: [s := torch.sin(x), s == s.amax()], x) == ["aten.sin.default"]
    assert marked(lambda x: [s := torch.sin(x), s > s.mean()], x) == []
