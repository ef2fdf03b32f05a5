"""Reductions along some dimensions of what lies in parts: ranks send what is small, and keep their parts."""

from __future__ import annotations

from typing import Any

import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import examples
from sharded_steps import numbers
from torch import Tensor

import fdp


def messages_of_adafactor() -> list[tuple[str, str, int]]:
    """The messages of a step with Adafactor: which collective, whether of a gradient, and the numbers that are sent."""
    optimizer = fdp.optim.from_torch(torch.optim.Adafactor, lr=0.01)

    def step(state: Any, x: Tensor) -> Any:
        grads = fdp.grad(lambda p: (x @ p["w"]).square().mean())(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}

    params = fdp.shard({"w": numbers(48, 40)})
    trace = fdp.data_parallel(step).trace({"params": params, "opt": optimizer.init(params)}, numbers(3, 48))
    return [(r.op, r.kind, r.numel) for r in trace.reductions if r.name != "state['params']['w']"]


def test_adafactor_works_on_parts_of_matrices() -> None:
    """A gradient is scattered. Norms of rows, of columns and of the whole are sent, and no other matrix."""
    for found in ranks.run(2, messages_of_adafactor):
        (op, kind, numel), *others = found
        assert (op, kind, numel) == ("mean_scatter", "gradient", 48 * 40)
        assert sorted(others) == [("all_gather", "value", 24), *[("sum", "value", 1)] * 2, ("sum", "value", 40)]


REDUCTIONS = ["sum", "mean", "amax", "amin", "norm", "infinite norm", "any", "all", "count", "share"]


def reduced(x: Tensor, name: str, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if name == "norm":
        return torch.linalg.vector_norm(x, 2, dims, keepdim)
    if name == "infinite norm":
        return torch.linalg.vector_norm(x, torch.inf, dims, keepdim)
    if name in ("count", "share"):
        positive = x > 0
        return (
            positive.sum(dims, keepdim, dtype=x.dtype)
            if name == "count"
            else positive.mean(dims, keepdim, dtype=x.dtype)
        )
    if name in ("any", "all"):
        return getattr((x > (1 if name == "any" else -1)), name)(dims[0], keepdim)
    result: Tensor = getattr(x, name)(dims, keepdim)
    return result


def differences(shape: tuple[int, ...], cases: list[tuple[str, tuple[int, ...], bool]], nans: bool) -> list[str]:
    """What a step makes of a tensor in parts and plain PyTorch of the whole one, where that differs."""
    x = numbers(*shape, seed=len(cases)).double()
    if nans:
        x[x > 0.8] = torch.nan

    def step(state: Any) -> Any:
        return [reduced(state["x"] * 2, *case) for case in cases], {"x": state["x"]}

    found, _ = fdp.data_parallel(step, batch_argnums=())(fdp.shard(fdp.replicate({"x": x}), min_size=0))
    due = [reduced(x * 2, *case) for case in cases]
    return [
        f"{case}: {one}, {two} is due"
        for case, one, two in zip(cases, found, due, strict=True)
        if one.shape != two.shape or not torch.allclose(one.double(), two.double(), 1e-12, 1e-12, equal_nan=True)
    ]


shapes = st.sampled_from([(4, 6), (5, 6), (8,), (4, 3, 2), (3, 4, 5), (3, 5, 4), (2, 1, 6), (3, 1, 8)])


def of_rows_with_nan() -> list[str]:
    """In many rows, of numbers that round."""
    cases = [(name, (dim,), False) for name in ("sum", "mean") for dim in (0, 1)]
    return differences((64, 64), cases, True)


def test_a_nan_in_some_sums_hides_nothing_of_the_others() -> None:
    assert ranks.run(2, of_rows_with_nan) == [[], []]


@st.composite
def cases(draw: Any) -> Any:
    shape = draw(shapes)
    dims = st.lists(
        st.integers(-len(shape), len(shape) - 1), min_size=1, max_size=2, unique_by=lambda d: d % len(shape)
    )
    case = st.tuples(st.sampled_from(REDUCTIONS), dims.map(tuple), st.booleans())
    return shape, draw(st.lists(case, min_size=1, max_size=4)), draw(st.booleans())


@examples(60, by_default=15)
@given(cases())
def test_parts_are_reduced_along_any_dimensions_to_what_the_whole_is(case: Any) -> None:
    assert ranks.run(2, differences, *case) == [[], []]
