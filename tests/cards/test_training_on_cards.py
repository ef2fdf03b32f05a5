"""Training on a CUDA device, alone and by NCCL, beside a loop in plain PyTorch on the same device."""

from __future__ import annotations

import warnings
from typing import Any

import cards
import models
import pytest
import torch
import torch.distributed as dist
from cards import needs_a_card, on_card
from ways import WAYS

import fdp

pytestmark = needs_a_card
STEPS = 6
ALIKE = {"fallback_random": True}
"""Compiled for a card, a step draws inductor's numbers, if nothing else is said."""
WAYS_ON_CARDS: dict[str, dict[str, Any]] = {
    name: {**way, "compile": ALIKE} if "compile" in way else way for name, way in WAYS.items()
}
WAYS_ON_CARDS |= {"recorded": {"compile": {"mode": "reduce-overhead"}, "donate_argnums": 0}}
NOT_RECORDED = ".*(not recorded|not be recorded|is not run) as a CUDA graph|.*the CUDA graph of step"
DOUBLE = torch.float64


def train(name: str, way: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One rank's side."""
    world, rank = dist.get_world_size(), dist.get_rank()
    apply, params, buffers = fdp.from_module(models.MODELS[name](DOUBLE).cuda())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    start = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    state = fdp.replicate(on_card(start) if way == "recorded" else start)
    step = fdp.data_parallel(models.fdp_step(apply, rule), **WAYS_ON_CARDS[way])
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=NOT_RECORDED)
        for i, batch in enumerate(models.batches(name, STEPS, 8, DOUBLE)):
            torch.manual_seed(models.noise_seed(i, rank))
            state, metrics = step(state, on_card(models.shard(batch, world, rank)))
            fdp.assert_replicated((state, metrics))
            assert models.same_bits_on_all_ranks(state["params"] | state["buffers"])
            losses.append(metrics["loss"].item())
    return {key: leaf.detach().cpu() for key, leaf in (state["params"] | state["buffers"]).items()}, losses


def oracle(name: str, shards: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = models.MODELS[name](DOUBLE).cuda()
    rule = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = [on_card(batch) for batch in models.batches(name, STEPS, 8, DOUBLE)]
    losses = models.trained_by_hand(model, rule, data, shards)
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return {key: value.detach().cpu() for key, value in values.items()}, losses


# A recorded step draws others, if anew at each call: see test_recorded_steps_draw_anew.
CASES = [(name, way) for name in models.MODELS for way in WAYS_ON_CARDS if (name, way) != ("gpt_dropout", "recorded")]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_ranks_on_cards_train_as_one_process_does(name: str, way: str, world: int) -> None:
    expected, losses = oracle(name, world)
    for values, found in cards.run(world, train, name, way):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        assert values.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-8, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


def test_ranks_that_have_nccl_alone_train_too() -> None:
    """No message can go by the CPU, where the learning rate and the counter of steps are."""
    expected, losses = oracle("mlp", 2)
    for values, found in cards.run(2, train, "mlp", "kept", backend="nccl"):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-8)


def as_ddp_does(way: str) -> None:
    """float32 gradients, averaged by NCCL, to the bit where two ranks add two numbers."""
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    model = DistributedDataParallel(models.mlp().cuda())
    apply, params, _ = fdp.from_module(models.mlp().cuda())

    def grads_of(params: Any, batch: models.Batch) -> Any:
        return fdp.grad(lambda params: models.loss_of(apply(params, {}, batch["x"])[0], batch))(params)

    step = fdp.data_parallel(grads_of, **WAYS[way])
    for batch in models.batches("mlp", 3, 8):
        mine = on_card(models.shard(batch, 2, rank))
        model.zero_grad()
        models.loss_of(model(mine["x"]), mine).backward()
        grads = step(params, mine)
        for key, leaf in model.module.named_parameters():
            exact = {"rtol": 0, "atol": 0} if way == "kept" else {}
            torch.testing.assert_close(grads[key], leaf.grad, **exact)


@pytest.mark.parametrize("way", ["kept", "compiled"])
def test_gradients_are_those_of_ddp(way: str) -> None:
    cards.run(2, as_ddp_does, way)


def adds_in_any_order() -> None:
    """Sums that a card adds in another order each time; Adam makes whole steps of what is left where they are zero."""
    w = torch.randn(64, 512, device="cuda")
    index = torch.arange(4096, device="cuda") % 64
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def train_step(state: Any, x: torch.Tensor) -> Any:
        def loss(w: torch.Tensor) -> torch.Tensor:
            return torch.zeros(64, 512, device="cuda").index_add(0, index, (w[index] * x).sin()).square().mean()

        loss, grads = fdp.value_and_grad(loss)(state["w"])
        w, opt = rule.update(grads, state["opt"], state["w"])
        return {"w": w, "opt": opt}, fdp.pmean(loss)

    x = torch.randn(4096, 512, device="cuda")
    x[2048:] = -x[:2048]
    for compile in (False, True):
        step = fdp.data_parallel(train_step, compile=compile)
        state = {"w": w.clone(), "opt": rule.init(w)}
        for _ in range(3):
            state, loss = step(state, x)
        assert loss.isfinite()


def test_kernels_that_do_not_repeat_themselves_are_taken_for_right() -> None:
    cards.run(1, adds_in_any_order)


def draws(way: str) -> None:
    """Dropout of the card's own generator: the masks and the generator's state of the eager program."""

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    # The product has a size at which inductor tries another one on numbers that it draws.
    step = fdp.data_parallel(
        lambda state, x: (state + fdp.pmean((x @ x.t()).mean()), fdp.per_rank(drawn(x))), **WAYS_ON_CARDS[way]
    )
    state, x = torch.zeros(3, device="cuda"), torch.ones(64, 33, device="cuda")
    rank, seen = dist.get_rank(), []
    for call in range(3):
        torch.manual_seed(10 * call + rank)
        state, found = step(state, x)
        after = torch.rand(4, device="cuda")
        torch.manual_seed(10 * call + rank)
        assert torch.equal(found, drawn(x)), call
        assert torch.equal(after, torch.rand(4, device="cuda")), call
        seen.append(found)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_draws_as_the_eager_program(way: str, world: int) -> None:
    cards.run(world, draws, way)


def recorded_draws() -> None:
    step = fdp.data_parallel(
        lambda s, x: (s + 1, fdp.per_rank(torch.nn.functional.dropout(x, 0.5))),
        donate_argnums=0,
        compile={"mode": "reduce-overhead"},
    )
    state, x, seen = torch.zeros(3, device="cuda"), torch.ones(64, 33, device="cuda"), []
    for _ in range(6):
        state, found = step(state, x)
        seen.append(found.clone())
    for i, one in enumerate(seen):
        assert abs(float((one == 0).float().mean()) - 0.5) < 0.1
        assert not any(torch.equal(one, two) for two in seen[:i])


def test_recorded_steps_draw_anew() -> None:
    cards.run(1, recorded_draws)
