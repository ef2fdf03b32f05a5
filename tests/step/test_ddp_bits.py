"""Two ranks against DistributedDataParallel with the fused AdamW: the same bits after each step.

Why this is possible with two ranks: a mean of two addends has one order of summation, and halving is exact
(short of underflow) whether it is done before the sum, as DDP does, or after it, as gloo's average does. The
kernels of forward, backward and update are the same on both sides. Tied weights, too: both sides leave it to
autograd to add the two contributions, in the same order.

Where it is not possible:
- Four ranks: gloo's ring adds the addends of an element in an order that depends on where the element lies in
  its buffer, so two bucket layouts differ in the last bit. `test_oracle.py` compares those within a
  tolerance.
- BatchNorm statistics averaged over ranks: DDP does not average them, it overwrites every rank's buffers with
  rank 0's before each forward pass. `fdp.broadcast` of the new buffers is that rule, and with it buffers are
  equal bit for bit as well; with `fdp.pmean` only the parameters are (training does not read the statistics).
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive
from torch.nn.parallel import DistributedDataParallel

STEPS = 20 if ALL_SAMPLES else 8
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "fused": True}


def train_ddp(name: str) -> list[dict[str, torch.Tensor]]:
    """Snapshots of parameters and rank 0's buffers after each step of DDP at its default settings."""
    rank = dist.get_rank()
    model = DistributedDataParallel(models.MODELS[name]())
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    out = []
    for i, batch in enumerate(models.batches(name, STEPS, 16)):
        piece = models.shard(batch, dist.get_world_size(), rank)
        torch.manual_seed(models.noise_seed(i, rank))
        optimizer.zero_grad()
        models.loss_of(model(piece["x"]), piece).backward()
        optimizer.step()
        values = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
        out.append({k: v.detach().clone() for k, v in values.items()})
    return out


def train_fdp(name: str, donate: bool, statistics: str) -> list[dict[str, torch.Tensor]]:
    """The same with fdp; `statistics` names the collective that makes the new buffers replicated."""
    import fdp

    rank = dist.get_rank()
    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **OPTIONS)
    shared = {"pmean": models.mean_statistics, "broadcast": fdp.broadcast}[statistics]

    @fdp.data_parallel(donate_argnums=0 if donate else ())
    def train_step(state: dict[str, Any], batch: models.Batch) -> dict[str, Any]:
        def loss_fn(params: Any) -> Any:
            logits, new = apply(params, state["buffers"], batch["x"])
            return models.loss_of(logits, batch), new

        (_, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": shared(new), "opt": opt}

    state = {"params": params, "buffers": buffers, "opt": optimizer.init(params)}
    out = []
    for i, batch in enumerate(models.batches(name, STEPS, 16)):
        torch.manual_seed(models.noise_seed(i, rank))
        state = train_step(state, models.shard(batch, dist.get_world_size(), rank))
        out.append({k: v.detach().clone() for k, v in (state["params"] | state["buffers"]).items()})
    return out


def compare(name: str, donate: bool, statistics: str) -> None:
    expected = train_ddp(name)
    got = train_fdp(name, donate, statistics)
    parameters = dict(models.MODELS[name]().named_parameters()).keys()
    for step, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
        assert theirs.keys() == ours.keys()
        # DDP's other ranks hold statistics of their own until the next forward pass takes rank 0's.
        compared = theirs.keys() if statistics == "broadcast" and dist.get_rank() == 0 else parameters
        for key in compared:
            equal = torch.equal(theirs[key].contiguous(), ours[key].contiguous())
            assert equal, f"step {step}, {key}: {(theirs[key] - ours[key]).abs().max()}"


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=exhaustive) for name in ("mlp", "gpt")), "cnn", "gpt_dropout"]
)
def test_bit_for_bit_equal_to_ddp(name: str, donate: bool) -> None:
    ranks.run(2, compare, name, donate, "broadcast")


def test_averaged_statistics_leave_the_parameters_equal() -> None:
    ranks.run(2, compare, "cnn", True, "pmean")


def train_ddp_twice(name: str) -> tuple[str, str, str]:
    runs = train_ddp(name), train_ddp(name)
    return models.digest(runs[0]), models.digest(runs[1]), models.digest(runs[0][:-1])


def test_ddp_repeats_itself_and_moves() -> None:
    """The yardstick is deterministic, and its last step changes the parameters it is compared by."""
    first, second, shorter = ranks.run(2, train_ddp_twice, "gpt_dropout")[0]
    assert first == second != shorter
