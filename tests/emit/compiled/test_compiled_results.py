"""A compiled step computes what the step computes operator by operator: on two ranks, and in one process.

Gradients round a little differently when they are computed in fused loops. SGD passes that on as it is, so it is held
to the tolerance of float32. AdamW divides a gradient by its own size: where the true one is zero, rounding decides in
which direction a parameter moves by a whole learning rate; so it is compared in float64, where that is far below what
is told apart.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import exhaustive, some

import fdp

STEPS = 3
CAPS = [1e-4, 1e-3, 2e-3]
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
}
TOLERANCES: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    # The absolute part is for gradients that are zero but for rounding.
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
}


def trainer(name: str, optimizer: str, donate: bool, dtype: torch.dtype, compile: Any) -> tuple[Any, Any]:
    apply, params, buffers = fdp.from_module(models.MODELS[name](dtype))
    cls, options = OPTIMIZERS[optimizer]
    rule = fdp.optim.from_torch(cls, **options)
    state = fdp.replicate({"params": params, "buffers": buffers, "opt": rule.init(params)})
    step = fdp.data_parallel(
        models.fdp_step(apply, rule), donate_argnums=0 if donate else (), bucket_cap_mb=CAPS, compile=compile
    )
    return step, state


def train_both_ways(name: str, optimizer: str, donate: bool, dtype: torch.dtype) -> int:
    """One rank's side; returns the number of buckets."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    # On a CPU what is compiled draws the random numbers that it would draw uncompiled.
    compiled, state = trainer(name, optimizer, donate, dtype, True)
    plain, expected = trainer(name, optimizer, donate, dtype, False)
    buckets = 0
    for i, batch in enumerate(models.batches(name, STEPS, 8, dtype)):
        piece = models.shard(batch, world, rank)
        buckets = buckets or len(compiled.plan(state, piece).buckets)
        before, leaves = models.digest(state), optree.tree_leaves(state)
        torch.manual_seed(models.noise_seed(i, rank))
        new, metrics = compiled(state, piece)
        if donate:
            assert all(one is two for one, two in zip(optree.tree_leaves(new), leaves, strict=True))
        else:
            assert models.digest(state) == before, f"step {i} changed a state that was not donated"
        state = new
        assert world == 1 or models.same_bits_on_all_ranks((state, metrics)), f"ranks differ after step {i}"
        torch.manual_seed(models.noise_seed(i, rank))
        expected, expected_metrics = plain(expected, piece)
        torch.testing.assert_close(
            (state, metrics), (expected, expected_metrics), msg=lambda m, i=i: f"step {i}: {m}", **TOLERANCES[dtype]
        )
    return buckets


CASES = [
    pytest.param("mlp", "sgd", True, torch.float32, marks=exhaustive),
    ("mlp", "fused adamw", False, torch.float64),
    pytest.param("cnn", "sgd", True, torch.float32, marks=exhaustive),
    pytest.param("gpt_dropout", "fused adamw", True, torch.float64, marks=exhaustive),
]


@pytest.mark.parametrize(("name", "optimizer", "donate", "dtype"), CASES)
def test_two_ranks_train_as_without_the_compiler(name: str, optimizer: str, donate: bool, dtype: torch.dtype) -> None:
    assert min(ranks.run(2, train_both_ways, name, optimizer, donate, dtype)) >= 3


@exhaustive
def test_an_optimizer_without_a_kernel_of_its_own() -> None:
    train_both_ways("mlp", "adamw", True, torch.float64)


def drop_out() -> dict[str, Any]:
    """What one rank draws: three calls by a seed of its own, the same again, and one by a seed that all ranks share."""
    rank = dist.get_rank()

    # On a CPU it would draw as without a compiler.
    @fdp.data_parallel(compile={"fallback_random": False})
    def step(weight: torch.Tensor, batch: torch.Tensor) -> Any:
        def loss_fn(w: torch.Tensor) -> Any:
            y = F.dropout(w * batch, 0.25)
            return y.sum(), y

        (_, dropped), grad = fdp.value_and_grad(loss_fn, has_aux=True)(weight)
        return fdp.per_rank({"one": F.dropout(batch, 0.25), "two": dropped}), grad

    def draw(seed: int, calls: int) -> list[Any]:
        torch.manual_seed(seed)
        return [step(weight, batch) for _ in range(calls)]

    weight, batch = torch.ones(64, 64), torch.ones(64, 64)
    return {"own": draw(5 + rank, 3), "again": draw(5 + rank, 3), "shared": draw(9, 1)}


def test_the_compilers_own_random_numbers() -> None:
    first, second = ranks.run(2, drop_out)
    for rank in (first, second):
        for drawn, _ in (*rank["own"], *rank["shared"]):
            for values in drawn.values():
                assert all(value == 0 or value == pytest.approx(4 / 3) for value in values.unique().tolist())
                assert 0.2 < (values == 0).float().mean() < 0.3
            # Two calls of dropout in one step are two masks.
            assert not torch.equal(drawn["one"], drawn["two"])
        torch.testing.assert_close(rank["again"], rank["own"], rtol=0, atol=0)
        masks = [drawn["one"] for drawn, _ in rank["own"]]
        assert not any(torch.equal(one, two) for one, two in itertools.combinations(masks, 2))
    assert not torch.equal(first["own"][0][0]["one"], second["own"][0][0]["one"])
    torch.testing.assert_close(first["shared"], second["shared"], rtol=0, atol=0)
    # The gradient goes through the mask that the loss went through, on each rank its own.
    for (one, grad), (two, _) in zip(first["own"], second["own"], strict=True):
        torch.testing.assert_close(grad, (one["two"] + two["two"]) / 2)


def cached_step() -> Any:
    @fdp.data_parallel(compile=True)
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * fdp.grad(lambda w: (batch @ w).tanh().square().mean())(w)

    return step


def found_in_cache() -> tuple[int, int, torch.Tensor]:
    from torch._dynamo.utils import counters

    result = cached_step()(torch.ones(3, 2), torch.ones(4, 3))
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], result


@exhaustive
def test_another_process_finds_the_program_in_the_cache() -> None:
    expected = cached_step()(torch.ones(3, 2), torch.ones(4, 3))
    (outcome,) = ranks.run_fresh(1, found_in_cache, init=False)
    assert outcome.ok, outcome.describe()
    hits, misses, result = outcome.value
    assert (hits, misses) == (1, 0)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("compile", some([False, True]))
def test_a_step_that_takes_or_computes_nothing(compile: bool) -> None:
    """Inductor gives such a graph back, without a text of its own; and no argument says which tensors are traced."""
    kept = torch.arange(4.0)
    steps: list[tuple[Any, Any]] = [
        (lambda: kept, kept),
        (lambda: kept.view(2, 2), kept.view(2, 2)),
        (lambda: kept.view(2, 2) + kept[1:3], kept.view(2, 2) + kept[1:3]),
        (lambda: 3, 3),
        (lambda: torch.zeros(3), torch.zeros(3)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, expected in steps:
            run = fdp.data_parallel(step, compile=compile)
            torch.testing.assert_close((run(), run()), (expected, expected))
