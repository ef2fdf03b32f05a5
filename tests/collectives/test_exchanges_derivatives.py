"""Derivatives of collectives that give each rank a part of its own, and `vmap` of them.

The oracle is one process that holds what all ranks hold: the gradient on a rank is that of the sum of all losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import stacked
import torch
from samples import exhaustive, some
from torch.autograd import gradcheck, gradgradcheck

import fdp

DOUBLE = torch.float64


def calls(size: int) -> dict[str, tuple[str, tuple[int, ...], dict[str, Any]]]:
    shift = [(rank, (rank + 1) % size) for rank in range(size)]
    return {
        "psum_scatter": ("psum_scatter", (2 * size, 3), {}),
        "psum_scatter of columns": ("psum_scatter", (2, 3 * size), {"axis": 1}),
        "pmean_scatter": ("pmean_scatter", (size, 2), {}),
        "all_to_all": ("all_to_all", (2 * size, 3), {"split_axis": 0, "concat_axis": 1}),
        "all_to_all back": ("all_to_all", (2, 3, size), {"split_axis": 2, "concat_axis": 0}),
        "ppermute": ("ppermute", (2, 3), {"perm": shift}),
        "ppermute of some": ("ppermute", (2, 3), {"perm": [(0, size - 1)]}),
    }


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def loss_of(y: torch.Tensor, rank: int) -> torch.Tensor:
    """Each rank has another loss; not symmetric in the elements."""
    weights = torch.arange(1.0, y.numel() + 1, dtype=DOUBLE).view(y.shape)
    return (y**3 * weights).sum() * (rank + 1)


def derivatives() -> None:
    rank, size = int(fdp.axis_index()), fdp.axis_size()
    for name, shape, arguments in calls(size).values():

        def collective(x: torch.Tensor, name: str = name, arguments: Any = arguments) -> torch.Tensor:
            out: torch.Tensor = getattr(fdp, name)(x, **arguments)
            return out

        def all_of(xs: list[torch.Tensor], name: str = name, arguments: Any = arguments) -> list[torch.Tensor]:
            return stacked.COLLECTIVES[name](xs, **arguments)

        def total(xs: list[torch.Tensor], all_of: Any = all_of) -> torch.Tensor:
            return torch.stack([loss_of(y, r) for r, y in enumerate(all_of([x.tanh() for x in xs]))]).sum()

        def own(x: torch.Tensor, collective: Any = collective) -> torch.Tensor:
            return loss_of(collective(x.tanh()), rank)

        xs = [drawn(r, *shape) for r in range(size)]
        expected = torch.func.grad(total)(xs)[rank]
        x = xs[rank].clone().requires_grad_()
        (found,) = torch.autograd.grad(own(x), x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.func.grad(own)(xs[rank]), expected)
        # Of a gradient once more: what ranks send back is sent back.
        again = torch.func.grad(lambda xs, total=total: sum((g**2).sum() for g in torch.func.grad(total)(xs)))(xs)[rank]
        torch.testing.assert_close(
            torch.func.grad(lambda x, own=own: (torch.func.grad(own)(x) ** 2).sum())(xs[rank]), again
        )
        ys = all_of(xs)
        cotangents = [drawn(100 + r, *ys[r].shape) for r in range(size)]
        (back,) = torch.func.vjp(collective, xs[rank])[1](cotangents[rank])
        torch.testing.assert_close(back, torch.func.vjp(all_of, xs)[1](cotangents)[0][rank])
        tangents = [drawn(200 + r, *shape) for r in range(size)]
        value, tangent = torch.func.jvp(collective, (xs[rank],), (tangents[rank],))
        torch.testing.assert_close(value, ys[rank])
        torch.testing.assert_close(tangent, all_of(tangents)[rank])  # they are linear
        batches(collective, all_of, shape, rank, size)


def batches(collective: Any, all_of: Any, shape: tuple[int, ...], rank: int, size: int) -> None:
    """`vmap` over every dimension, of the value and of its gradient."""
    rows = [torch.stack([drawn(10 * r + k, *shape) for k in range(3)]) for r in range(size)]
    expected = torch.stack([all_of([row[k] for row in rows])[rank] for k in range(3)])
    for dim in range(-1, len(shape) + 1):
        given = rows[rank].movedim(0, dim)
        torch.testing.assert_close(torch.vmap(collective, in_dims=dim)(given), expected)
        found = torch.vmap(collective, in_dims=dim, out_dims=-1)(given)
        torch.testing.assert_close(found, expected.movedim(0, -1))
    nested = torch.vmap(torch.vmap(collective, in_dims=1))(torch.stack([rows[rank].movedim(0, 1)] * 2))
    torch.testing.assert_close(nested, torch.stack([expected] * 2))
    slopes = torch.vmap(torch.func.grad(lambda x: loss_of(collective(x), rank)))(rows[rank])
    for k in range(3):

        def total(xs: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([loss_of(y, r) for r, y in enumerate(all_of(xs))]).sum()

        torch.testing.assert_close(slopes[k], torch.func.grad(total)([row[k] for row in rows])[rank])


@pytest.mark.parametrize("world", [pytest.param(n, marks=exhaustive if n != 2 else ()) for n in (1, 2, 3)])
def test_outside_of_a_step(world: int) -> None:
    ranks.run(world, derivatives)


def in_a_step(compile: bool) -> None:
    """Through `torch.func.grad`, `.backward()`, `fdp.grad` and `jvp`, traced and planned together."""
    rank, size = int(fdp.axis_index()), fdp.axis_size()
    chosen = list(calls(size).values())[:: 2 if compile else 1]

    def local(x: torch.Tensor, at: int, weight: torch.Tensor) -> torch.Tensor:
        name, _, arguments = chosen[at]
        return loss_of(getattr(fdp, name)(x.tanh(), **arguments), 0) * weight

    def pairs_of(params: list[torch.Tensor], batch: dict[str, Any]) -> Any:
        return zip(params, batch["x"], strict=True)

    def step(params: list[torch.Tensor], batch: dict[str, Any]) -> Any:
        slopes = [torch.func.grad(local)(x, at, batch["weight"]) for at, x in enumerate(batch["x"])]
        leaves = [x.detach().requires_grad_() for x in batch["x"]]
        torch.autograd.backward([local(x, at, batch["weight"]) for at, x in enumerate(leaves)])
        again = [leaf.grad for leaf in leaves]
        tangents = [
            torch.func.jvp(lambda x, at=at: getattr(fdp, chosen[at][0])(x, **chosen[at][2]), (x,), (x * 2,))[1]
            for at, x in enumerate(batch["x"])
        ]
        products = fdp.grad(
            lambda p: sum(local(q * x, k, batch["weight"]) for k, (q, x) in enumerate(pairs_of(p, batch)))
        )
        means = products(params)
        return means, fdp.per_rank((slopes, again, tangents))

    xs = [[drawn(50 * at + r, *shape) for r in range(size)] for at, (_, shape, _) in enumerate(chosen)]
    params = [drawn(900 + at, *shape) for at, (_, shape, _) in enumerate(chosen)]
    run = fdp.data_parallel(step, compile=compile)
    batch = {"x": [each[rank] for each in xs], "weight": torch.tensor(rank + 1.0, dtype=DOUBLE)}
    for _ in range(2):
        means, (slopes, again, tangents) = run(params, batch)
    for at, (name, _, arguments) in enumerate(chosen):

        def total(given: list[torch.Tensor], name: str = name, arguments: Any = arguments) -> torch.Tensor:
            ys = stacked.COLLECTIVES[name]([x.tanh() for x in given], **arguments)
            return torch.stack([loss_of(y, r) for r, y in enumerate(ys)]).sum()

        expected = torch.func.grad(total)(xs[at])[rank]
        torch.testing.assert_close(slopes[at], expected)
        torch.testing.assert_close(again[at], expected)
        torch.testing.assert_close(tangents[at], 2 * stacked.COLLECTIVES[name](xs[at], **arguments)[rank])
        mean = torch.func.grad(lambda p, at=at, total=total: total([p * x for x in xs[at]]) / size)(params[at])
        torch.testing.assert_close(means[at], mean)


@pytest.mark.parametrize("world", some([2, 3]))
def test_inside_of_a_step(world: int) -> None:
    ranks.run(world, in_a_step, False)


@exhaustive
def test_compiled() -> None:
    ranks.run(2, in_a_step, True)


ONE_RANK: dict[str, Callable[[torch.Tensor], Any]] = {
    "psum_scatter": fdp.psum_scatter,
    "pmean_scatter": lambda x: fdp.pmean_scatter(x, axis=1),
    "all_to_all": lambda x: fdp.all_to_all(x, 0, 1),
    "ppermute": lambda x: fdp.ppermute(x, [(0, 0)]),
    "ppermute without pairs": lambda x: fdp.ppermute(x, []),
}


@pytest.mark.parametrize("name", ONE_RANK)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex128], ids=str)
def test_against_finite_differences(name: str, dtype: torch.dtype) -> None:
    x = drawn(0, 2, 3).to(dtype).requires_grad_()
    x = (x * (1 + 1j)).detach().requires_grad_() if dtype.is_complex else x
    assert gradcheck(lambda x: ONE_RANK[name](x * x), x)
    assert gradgradcheck(lambda x: ONE_RANK[name](x * x * x), x)
