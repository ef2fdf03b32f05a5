"""Steps within a limit of memory: sharded state is gathered again for the backward pass, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from gather_choices import gather_again
from samples import ALL_SAMPLES, exhaustive
from sharded_steps import STEPS, all_differences
from torch import nn

import fdp
from fdp import pytree

WIDTH, LAYERS = 512, 6 if ALL_SAMPLES else 4


def layers(p: Any, x: torch.Tensor) -> torch.Tensor:
    for at in range(LAYERS):
        x = torch.tanh(x @ p[f"w{at}"].t())
    return x


def state_of() -> Any:
    generator = torch.Generator().manual_seed(0)
    params = {f"w{at}": torch.randn(WIDTH, WIDTH, generator=generator) / 24 for at in range(LAYERS)}
    return {"params": params, "m": pytree.map_leaves(torch.zeros_like, params)}


def train(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    loss, grads = fdp.value_and_grad(lambda p: (layers(p, x) - x).square().mean())(state["params"])
    moved = pytree.map_leaves(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"params": pytree.map_leaves(lambda p, m: p - 0.1 * m, state["params"], moved), "m": moved}, fdp.pmean(loss)


def batch_of() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(int(fdp.axis_index())))


def run(compile: bool, limit_mb: float | None, **options: Any) -> tuple[Any, fdp.Step]:
    step = fdp.data_parallel(train, donate_argnums=0, compile=compile, memory_limit_mb=limit_mb, **options)
    state = fdp.shard(state_of())
    for _ in range(3):
        state, _ = step(state, batch_of())
    return fdp.unshard(state), step


def gathered_again(compile: bool) -> list[Any]:
    plain, step = run(compile, None)
    most = step.plan(fdp.shard(state_of()), batch_of()).memory().peak_bytes / 2**20
    within, step = run(compile, 0.8 * most)
    assert step.traces == 1
    plan = step.plan(fdp.shard(state_of()), batch_of())
    gathers = [reduction.name for reduction in plan.trace.reductions if reduction.op == "all_gather"]
    assert len(gathers) == 2 * LAYERS - 1  # all but the first, which sends nothing back
    assert plan.memory().peak_bytes / 2**20 <= 0.8 * most
    same = [torch.equal(a, b) for a, b in zip(pytree.leaves_of(plain), pytree.leaves_of(within), strict=True)]
    return [all(same), [type(item).__name__ for item in plan.schedule].count("Start") == len(plan.buckets)]


def test_a_step_that_would_take_more_gathers_again_and_computes_the_same() -> None:
    assert ranks.run(2, gathered_again, False) == [[True, True]] * 2


@exhaustive
def test_a_compiled_step_does() -> None:
    assert ranks.run(2, gathered_again, True) == [[True, True]] * 2


def no_differences_where_all_is_gathered_again(names: list[str], compile: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        gather_again(patch)
        return all_differences(names, compile)


@pytest.mark.parametrize(
    "name", [name if name == "checkpointed" else pytest.param(name, marks=exhaustive) for name in STEPS]
)
def test_steps_of_all_kinds_may_gather_again(name: str) -> None:
    assert ranks.run(2, no_differences_where_all_is_gathered_again, [name], False) == [[], []]


def test_few_values_are_whole_at_once() -> None:
    """Each message begins when the one before is there: of all matrices no more than two are whole at any time."""
    assert ranks.run(2, whole_at_once) == [2, 2]


def whole_at_once() -> int:
    with pytest.MonkeyPatch.context() as patch:
        gather_again(patch)
        _, step = run(False, 3.0 * LAYERS, bucket_cap_mb=1)
        plan = step.plan(fdp.shard(state_of()), batch_of())
    gathers = {b.index for b in plan.buckets if b.op == "all_gather"}
    found = plan.emit().memory.pieces
    pieces = [piece for piece in found if piece.bucket in gathers and piece.name.startswith("result")]
    assert len(pieces) == 2 * LAYERS - 1
    return max(sum(one.first <= at <= one.last for one in pieces) for at in range(max(p.last for p in pieces) + 1))


def too_much() -> list[str]:
    found = []
    for limit, state in ((1.0, fdp.shard(state_of())), (1.0, fdp.replicate(state_of()))):
        step = fdp.data_parallel(train, memory_limit_mb=limit)
        with pytest.raises(fdp.ArgumentError, match=r"'train' does not fit in memory_limit_mb=1\.") as caught:
            step(state, batch_of())
        found.append(str(caught.value).split("Remedy: ")[1])
        least = float(found[-1].split("=")[1].split(" ")[0])
        fdp.data_parallel(train, memory_limit_mb=least)(state, batch_of())
        with pytest.raises(fdp.ArgumentError, match="does not fit"):
            fdp.data_parallel(train, memory_limit_mb=least - 0.02)(state, batch_of())
    return found


def test_a_limit_that_cannot_be_met_names_the_least_that_can() -> None:
    for sharded, whole in ranks.run(2, too_much):
        assert "is the least that can be kept" in sharded and "shard state" not in sharded
        assert "shard state with fdp.shard" in whole


@pytest.mark.parametrize("limit", [0, -1, True, "2 GB", float("nan")])
def test_a_limit_is_a_positive_number(limit: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match="memory_limit_mb="):
        fdp.data_parallel(train, memory_limit_mb=limit)


def test_a_copy_of_a_step_keeps_its_limit() -> None:
    import copy

    with pytest.raises(fdp.ArgumentError, match="does not fit in memory_limit_mb=1"):
        copy.copy(fdp.data_parallel(train, memory_limit_mb=1))(state_of(), batch_of())


def embedded(state: Any, ids: torch.Tensor) -> Any:
    """A table that is read forwards and backwards, and by a tied layer; and a norm that reads what was gathered."""

    def loss(p: Any) -> torch.Tensor:
        x = F.embedding(ids, p["table"])
        x = F.layer_norm(x @ p["w"], (64,))
        return F.cross_entropy(x @ p["table"].t(), ids) + torch.linalg.matrix_norm(p["w"], 2) * 1e-3

    grads = fdp.grad(loss)(state)
    return pytree.map_leaves(lambda p, g: p - 0.1 * g, state, grads), torch.linalg.matrix_norm(state["w"], 2)


def tied(again: bool) -> list[Any]:
    torch.manual_seed(0)
    state = fdp.shard({"table": torch.randn(128, 64) / 8, "w": torch.randn(64, 64) / 8})
    with pytest.MonkeyPatch.context() as patch:
        if again:
            gather_again(patch)
        step = fdp.data_parallel(embedded)
        for _ in range(3):
            state, norm = step(state, torch.arange(10) * 7 % 128)
    return [*pytree.leaves_of(fdp.unshard(state)), norm]


def test_what_is_read_in_many_places_is_the_same() -> None:
    once, again = ranks.run(2, tied, False)[0], ranks.run(2, tied, True)[0]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_a_world_of_one_takes_a_limit() -> None:
    module = nn.Linear(64, 64)
    apply, params, buffers = fdp.from_module(module)
    step = fdp.data_parallel(
        lambda p, x: pytree.map_leaves(
            lambda p, g: p - g, p, fdp.grad(lambda p: apply(p, buffers, x)[0].square().mean())(p)
        ),
        memory_limit_mb=1,
    )
    assert step(params, torch.ones(4, 64))["weight"].shape == (64, 64)
