"""Odd things that a step does with sharded state, on real ranks, beside the same step with whole state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from samples import ALL_SAMPLES, exhaustive, some
from torch import Tensor

import fdp
from fdp import optim, pytree

State = dict[str, Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start() -> State:
    return {
        "w": numbers(6, 12, seed=1),
        "v": numbers(6, 12, seed=2),
        "s": numbers(6, 6, seed=3),
        "t": numbers(2, 5, seed=4),
    }


def views(state: State, x: Tensor) -> Any:
    """No-op views that name sizes."""
    w, t = state["w"], state["t"]
    seen = w.view(6, 12) + w.reshape(w.shape) + w.expand(6, 12) + w.view_as(state["v"])
    seen = seen + torch.as_strided(w, (6, 12), (12, 1))
    twice = (w * 2).view(6, 12) * 1.5
    return {**state, "w": seen, "t": t.squeeze() + t.expand(t.shape)}, twice.broadcast_to(6, 12).unflatten(
        0, (6,)
    ).sum()


def extremes(state: State, x: Tensor) -> Any:
    w = state["w"]
    norms = [torch.linalg.vector_norm(w, order) for order in (torch.inf, -torch.inf)]
    whole_numbers = [(w * 100).int().max(), (w.abs().clamp(max=2) * 100).to(torch.uint8).min()]
    return state, [w.max(), w.amax(), w.min(), w.amin(), *norms, *whole_numbers]


def with_nan(row: int) -> State:
    state = start()
    state["w"][row, 3] = torch.nan
    return state


def narrow_dtypes(state: State, x: Tensor) -> Any:
    small = (state["w"] * 100).short()
    flags, bytes_ = state["w"] > 0, (state["w"] > -99).to(torch.uint8)
    sums = [small.sum(dtype=torch.int16), flags.sum(dtype=torch.bool), (state["w"].abs() + 1).prod().log()]
    return state, [small.amax(), small.max(), *sums, bytes_.all(), bytes_.any(), flags.all(), flags.any()]


def of_several_results(state: State, x: Tensor) -> Any:
    mantissa, exponent = torch.frexp(state["w"])
    return {**state, "w": state["w"] * 1.5 + mantissa.sum() * 1e-3}, exponent @ torch.ones(12, 1, dtype=torch.int32)


def lists(state: State, x: Tensor) -> Any:
    both = torch._foreach_mm([state["s"], state["s"]], [state["s"], state["s"]])
    torch._foreach_zero_([copy := state["s"].clone()])
    return {**state, "s": state["s"] + 0.1 * both[0]}, [*torch._foreach_max([state["w"], both[1]]), copy.sum()]


def regularised(state: State, x: Tensor) -> Any:
    """Numbers of sharded parameters inside of the microbatches."""

    def loss(p: State, x: Tensor) -> Tensor:
        return (x @ p["w"]).square().mean() + 0.01 * p["v"].norm() + 0.01 * (p["v"] * p["v"]).amax()

    value, grads = fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)({key: state[key] for key in ("w", "v")}, x)
    return {**state, **{key: state[key] - 0.1 * grad for key, grad in grads.items()}}, fdp.pmean(value)


def changed_before_a_loop(state: State, x: Tensor) -> Any:
    w = state["w"] * 1
    first = w.sum()
    w.mul_(0.5)

    def loss(p: Tensor, x: Tensor) -> Tensor:
        return (x @ w @ p.t()).square().mean()

    grad = fdp.accumulate(fdp.grad(loss), microbatches=2)(state["v"], x)
    return {**state, "w": w, "v": state["v"] - 0.1 * grad}, first


STEPS: dict[str, Callable[[State, Tensor], Any]] = {
    "views": views,
    "extremes": extremes,
    "narrow dtypes": narrow_dtypes,
    "of several results": of_several_results,
    "lists": lists,
    "regularised": regularised,
    "changed before a loop": changed_before_a_loop,
}


def same(step: Any, state: State, x: Tensor, what: str, **options: Any) -> None:
    """With whole state and with sharded state."""
    whole = fdp.data_parallel(step, **options)(fdp.replicate(state), x)
    parted, result = fdp.data_parallel(step, **options)(fdp.shard(fdp.replicate(state), min_size=2), x)
    found = (fdp.unshard(parted), result)
    for path, one, two in zip(pytree.leaf_names(found, ""), *map(pytree.leaves_of, (found, whole)), strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype), f"{what}{path}: {one.dtype} {list(one.shape)}"
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5, equal_nan=True), f"{what}{path}: {one} for {two}"


def all_the_same() -> None:
    warnings.simplefilter("ignore")
    x = numbers(4, 6, seed=10 + int(fdp.axis_index()))
    for at, (name, step) in enumerate(STEPS.items()):
        for check in (True, False) if ALL_SAMPLES else (at % 2 == 0,):
            same(step, start(), x, name, check_trace=check)
    for row in (0, 5):
        same(extremes, with_nan(row), x, f"NaN in row {row}")


@pytest.mark.parametrize("size", some([2, 3]))
def test_what_is_odd_is_the_same_on_parts(size: int) -> None:
    ranks.run(size, all_the_same)


def updates_that_are_not_finite(wrap: str) -> None:
    inner = optim.from_torch(torch.optim.AdamW, lr=0.1)
    made = {
        "skipped": lambda: optim.skip_nonfinite(inner),
        "scaled": lambda: optim.loss_scaled(inner),
        "clipped": lambda: optim.clipped(inner, 0.1, torch.inf),
    }[wrap]()

    def step(state: State, x: Tensor) -> Any:
        def loss(p: State) -> Tensor:
            return (p["w"].sum(1) * x).sum() + p["w"].square().sum()

        value, grads = fdp.value_and_grad(loss)(state["p"])
        params, opt = made.update(grads, state["o"], state["p"])
        return {"p": params, "o": opt}, fdp.pmean(value)

    for row in (0, 5):  # of the part of one rank, and of another's
        params = {"w": numbers(6, 12, seed=1)}
        x = torch.ones(6)
        if fdp.axis_index() == 1:
            x[row] = torch.nan
        same(step, {"p": params, "o": made.init(params)}, x, f"row {row}")


@pytest.mark.parametrize("wrap", some(["skipped", "scaled", "clipped"], 3))
def test_a_nan_in_any_part_is_seen_by_all(wrap: str) -> None:
    ranks.run(2, updates_that_are_not_finite, wrap)


def held_by_the_step() -> None:
    held = fdp.shard(numbers(4, 4), min_size=0)
    with pytest.raises(fdp.TraceError, match=r"closes over sharded leaves(.|\n)*DTensor of shape \[4, 4\]"):
        fdp.data_parallel(lambda state, x: state + held)(numbers(4, 4), numbers(2))


def test_a_step_that_closes_over_a_sharded_leaf_is_refused() -> None:
    ranks.run(2, held_by_the_step)


def sharded_anew_for_each_call() -> list[float]:
    """Nothing keeps the mesh of a call's state when the call is over."""
    step = fdp.data_parallel(lambda state, x: ({"w": state["w"] * 2}, fdp.pmean(x).sum()))
    whole, found = {"w": torch.ones(4, 4)}, []
    for _ in range(3):
        new, _ = step(fdp.shard(whole, min_size=0), torch.ones(2))
        whole = fdp.unshard(new)
        del new
        found.append(float(whole["w"][0, 0]))
    return found


def test_state_may_be_sharded_anew_for_each_call() -> None:
    assert ranks.run(2, sharded_anew_for_each_call) == [[2.0, 4.0, 8.0]] * 2


def written_with_what_varies() -> list[bool]:
    """Donated state goes in sharded, is overwritten with each rank's own, and averaged."""

    def step(state: Any, x: torch.Tensor) -> Any:
        before = state["w"] * 1
        state["w"].copy_(x)
        return {"w": fdp.pmean(state["w"]) + before}

    x = torch.full((4, 4), float(fdp.axis_index()) + 1)
    state = fdp.shard({"w": torch.ones(4, 4)}, min_size=0)
    found = fdp.unshard(fdp.data_parallel(step, donate_argnums=0)(state, x))["w"]
    return [torch.equal(found, torch.full((4, 4), 2.5))]


def test_sharded_state_may_be_overwritten_with_each_ranks_own() -> None:
    assert ranks.run(2, written_with_what_varies) == [[True]] * 2


def beside_a_leaf_with_gaps() -> list[bool]:
    """A leaf that stays whole lies as it lay, in the comparison as well."""

    def step(state: Any, x: torch.Tensor) -> Any:
        state["gaps"].unfold(0, 2, 2).add_(fdp.pmean(x).sum())
        return {"w": state["w"] * 2, "gaps": state["gaps"]}

    gaps = torch.arange(8.0)[::2]
    state = {"w": fdp.shard(torch.ones(4, 4), min_size=0), "gaps": gaps}
    found = fdp.data_parallel(step, donate_argnums=0)(state, torch.ones(2))
    whole = fdp.unshard(found["w"])
    return [found["gaps"].tolist() == [2.0, 4.0, 6.0, 8.0], torch.equal(whole, torch.full((4, 4), 2.0))]


def test_a_leaf_with_gaps_may_stand_beside_a_sharded_one() -> None:
    assert ranks.run(2, beside_a_leaf_with_gaps) == [[True, True]] * 2


def adam_with_a_sharded_state(donate: bool) -> tuple[int, list[bool], list[str], bool]:
    """ZeRO-1: how many messages fill old parameters, which of these stay, what is called, and if it is right.

    Each parameter is too large to share a message with the other one.
    """
    params = fdp.replicate({"v": numbers(513, 640, seed=2), "w": numbers(512, 640, seed=1)})
    optimizer = optim.from_torch(torch.optim.Adam, lr=1e-2)
    x = (numbers(8, 512, seed=3) + fdp.axis_index()) / 32

    def step(state: State, x: Tensor) -> Any:
        def loss(p: State) -> Tensor:
            return ((x @ p["w"]).tanh() @ p["v"].t()).square().mean()

        grads = fdp.grad(loss)(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}

    def fresh() -> State:
        return {"params": pytree.map_leaves(torch.clone, params), "opt": fdp.shard(optimizer.init(params), min_size=1)}

    expected = fdp.data_parallel(step)({"params": params, "opt": optimizer.init(params)}, x)["params"]
    sharded = fdp.data_parallel(step, donate_argnums=0 if donate else ())
    sharded(fresh(), x)  # it compares as well
    state = fresh()
    where = [p.data_ptr() for p in pytree.leaves_of(state["params"])]
    made = sharded.plan(state, x).emit()
    new = sharded(state, x)["params"]
    stayed = [p.data_ptr() == at for p, at in zip(pytree.leaves_of(new), where, strict=True)]
    called = [line.strip().split("(")[0] for line in made.source.splitlines()]
    return len(made.program.gathered), stayed, called, all(torch.equal(new[name], expected[name]) for name in new)


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
def test_new_parameters_arrive_in_the_old_ones(donate: bool) -> None:
    """One lies in parts by rows, and arrives there; the other one by columns, and is put together there."""
    for gathered, stayed, called, right in ranks.run(2, adam_with_a_sharded_state, donate):
        assert right
        assert (gathered, stayed) == ((1, [True, True]) if donate else (0, [False, False]))
        taken = [at for at, name in enumerate(called) if "index_select" in name]
        assert taken and min(taken) > called.index("wait"), (
            "parts of parameters are taken when their gradients are there"
        )
