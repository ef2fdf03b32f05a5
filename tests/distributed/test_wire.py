"""Gradients that are sent in sixteen bits, on real ranks, against a loop that rounds, adds up and averages."""

from __future__ import annotations

import itertools
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from bits import same_bits
from samples import ALL_SAMPLES, exhaustive

import fdp

Tree = dict[str, torch.Tensor]
WIRES = (torch.bfloat16, torch.float16)
WAYS = list(itertools.product(WIRES, (None, torch.float32)))
# Buckets of one gradient, of some, and of all.
CAPS = (0.001, 0.01, "auto") if ALL_SAMPLES else (0.01,)


def loss(p: Tree, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ p["w"] + p["b"] + p["none"].sum()) @ p["v"]
    return ((hidden.double() @ p["d"]) ** 2).mean().float() + (hidden.bfloat16() @ p["n"]).float().mean()


def new_params() -> Tree:
    """Odd sizes, which no number of ranks shares evenly; a wider dtype, a narrow one, and nothing at all."""
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(7, 301, generator=g) / 3,
        "b": torch.randn(301, generator=g),
        "v": torch.randn(301, 5, generator=g) / 9,
        "d": torch.randn(5, 3, generator=g, dtype=torch.float64),
        "n": torch.randn(5, 1, generator=g).bfloat16(),
        "none": torch.zeros(0),
    }


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(11, 7, generator=torch.Generator().manual_seed(rank + 1))


def step_fn(p: Tree, x: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    value, grads = fdp.value_and_grad(loss)(p, x)
    return grads, fdp.pmean(value)


def expected(p: Tree, wire: torch.dtype, accumulate: torch.dtype | None, world: int) -> Tree:
    """Each rank's gradients, computed here one after the other, rounded, added up and averaged."""
    local = [torch.func.grad(loss)(p, batch_of(rank)) for rank in range(world)]
    found = {}
    for key, parameter in p.items():
        narrow = wire if parameter.dtype.itemsize > 2 else parameter.dtype
        pieces = [grads[key].to(narrow).to(accumulate or narrow) for grads in local]
        total = pieces[0]
        for piece in pieces[1:]:
            total = total + piece
        found[key] = (total / world).to(narrow).to(parameter.dtype)
    return found


def equals_the_loop(compile: bool) -> None:
    """In a rank: every way, and every plan."""
    world, rank, params = dist.get_world_size(), dist.get_rank(), new_params()
    plain = fdp.data_parallel(step_fn)(params, batch_of(rank))
    for (wire, accumulate), cap in itertools.product(WAYS, CAPS):
        step = fdp.data_parallel(
            step_fn, wire_dtype=wire, accumulate_dtype=accumulate, compile=compile, bucket_cap_mb=cap
        )
        oracle = expected(params, wire, accumulate, world)
        for call in range(2):
            grads, mean = step(params, batch_of(rank))
            where = (wire, accumulate, cap, call)
            fdp.assert_replicated(grads)
            assert {k: g.dtype for k, g in grads.items()} == {k: p.dtype for k, p in params.items()}
            if not compile:
                assert torch.equal(mean, plain[1]), where  # a metric is sent as it is
            for key, value in oracle.items():
                if compile:
                    # Other arithmetic in front of the rounding, which may go to the other side.
                    scale = float(value.abs().max()) if value.numel() else 0.0
                    assert torch.allclose(grads[key], value, rtol=2**-6, atol=2**-8 * scale), (key, *where)
                elif world == 2 or accumulate is not None:
                    assert torch.equal(grads[key], value), (key, *where)
                else:
                    # Each sum rounds, and rings add in an order of their own.
                    size = sum(torch.func.grad(loss)(params, batch_of(r))[key].abs() for r in range(world)) / world
                    slack = 2 * world * torch.finfo(torch.bfloat16).eps
                    assert ((grads[key] - value).abs() <= slack * size + 1e-7).all(), (key, *where)


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=exhaustive) for n in (3, 4))])
def test_gradients_are_those_of_the_loop(world: int) -> None:
    ranks.run(world, equals_the_loop, False)


@exhaustive
def test_compiled_gradients_are_those_of_the_loop() -> None:
    ranks.run(2, equals_the_loop, True)


def train(name: str, donate: bool, options: dict[str, Any]) -> Tree:
    """Parameters and moments after six steps."""
    torch.manual_seed(3)
    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=3e-3, fused=True)
    step = fdp.data_parallel(models.fdp_step(apply, rule), donate_argnums=0 if donate else (), **options)
    state: Any = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    state = optree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, state)
    for i, batch in enumerate(models.batches(name, 6, 16)):
        torch.manual_seed(models.noise_seed(i, dist.get_rank()))
        state, _ = step(state, models.shard(batch, dist.get_world_size(), dist.get_rank()))
        assert models.same_bits_on_all_ranks(state)
    return state


def trains(name: str) -> None:
    plain = train(name, True, {})["params"]
    for wire, accumulate in WAYS if ALL_SAMPLES else WAYS[1:2]:
        options = {"wire_dtype": wire, "accumulate_dtype": accumulate}
        one, two = train(name, True, options), train(name, False, options)
        assert same_bits(one, two), "donation changed a bit"
        gaps = [float((one["params"][key] - plain[key]).abs().max()) for key in plain]
        # Adam's steps are of the size of the learning rate, whatever the gradient: six of them were made.
        assert 0 < max(gaps) < 6 * 3e-3


@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=exhaustive)])
def test_training_moves_alike(name: str) -> None:
    ranks.run(2, trains, name)


def large_gradients() -> tuple[torch.Tensor, ...]:
    """In a rank: above a mebibyte the division of a mean is part of filling the bucket."""
    world, rank = dist.get_world_size(), dist.get_rank()
    p = torch.randn(800, 900, generator=torch.Generator().manual_seed(5))
    xs = [torch.randn(4, 800, generator=torch.Generator().manual_seed(r)) for r in range(world)]

    def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.grad(lambda p: (torch.tanh(x @ p) ** 2).sum())(p)

    for (wire, accumulate), compile in itertools.product(WAYS, (False, True) if ALL_SAMPLES else (False,)):
        step = fdp.data_parallel(fn, wire_dtype=wire, accumulate_dtype=accumulate, compile=compile)
        found = step(p, xs[rank])
        fdp.assert_replicated(found)
        local = [torch.func.grad(lambda p, x=x: (torch.tanh(x @ p) ** 2).sum())(p) for x in xs]  # type: ignore[misc]
        mean = sum(g.to(wire).double() for g in local) / world
        size = sum(g.abs() for g in local) / world
        # What the compiler fuses is rounded elsewhere first, and then perhaps to the other side for the wire.
        slack = (2 * compile + (1 if accumulate else 3)) * torch.finfo(wire).eps
        wrong = 1e-6 * float(size.max())
        assert ((found - mean).abs() <= slack * size + wrong).all(), (wire, accumulate, compile)
    return ()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_large_buckets(world: int) -> None:
    ranks.run(world, large_gradients)


def overflows() -> dict[str, list[float]]:
    def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.grad(lambda p: (p * x).sum())(p)

    found = {}
    for wire, accumulate in WAYS:
        step = fdp.data_parallel(fn, wire_dtype=wire, accumulate_dtype=accumulate)
        found[f"{wire} {accumulate}"] = step(torch.ones(2), torch.tensor([98304.0, 49152.0])).tolist()
    return found


def test_what_float16_cannot_hold_is_infinite() -> None:
    found = ranks.run(2, overflows)[0]
    for wire, accumulate in WAYS:
        first = float("inf") if wire == torch.float16 else 98304.0
        # The second fits, and so does the mean of two; the sum of two does not.
        assert found[f"{wire} {accumulate}"] == [first, 49152.0]


def lost_in_a_sum() -> dict[str, list[float]]:
    """Gradients of three ranks that vanish, each by itself, beside that of the fourth in a sum of eight bits."""
    x = torch.full((4096,), 1.95 if dist.get_rank() else 512.0)
    found = {}
    for accumulate in (None, torch.float32):
        step = fdp.data_parallel(
            lambda p, x: fdp.grad(lambda p: (p * x).sum())(p), wire_dtype=torch.bfloat16, accumulate_dtype=accumulate
        )
        grad = step(torch.ones(4096), x)
        found[str(accumulate)] = [float(grad.min()), float(grad.max())]
    return found


def test_adding_in_float32_loses_less() -> None:
    found = ranks.run(4, lost_in_a_sum)[0]
    assert found["torch.float32"] == [129.0, 129.0]  # 517.86 / 4, rounded once
    assert found["None"][0] == 128.0


def with_another_wire() -> str:
    wire = torch.bfloat16 if dist.get_rank() else None
    step = fdp.data_parallel(step_fn, wire_dtype=wire)
    with pytest.raises(fdp.AgreementError) as caught:
        step(new_params(), batch_of(0))
    return str(caught.value)


def test_ranks_agree_on_the_wire() -> None:
    for text in ranks.run(2, with_another_wire):
        assert "torch.float32 on cpu" in text and "torch.bfloat16 on cpu" in text and "wire_dtype" in text


def with_another_sum() -> str:
    accumulate = torch.float32 if dist.get_rank() else None
    step = fdp.data_parallel(step_fn, wire_dtype=torch.bfloat16, accumulate_dtype=accumulate)
    with pytest.raises(fdp.AgreementError) as caught:
        step(new_params(), batch_of(0))
    return str(caught.value)


def test_ranks_agree_on_how_to_add() -> None:
    for text in ranks.run(2, with_another_sum):
        assert "added in float32" in text
