"""Checkpoints of state that lies on cards: whole, sharded, and labelled, with NCCL beside gloo and alone."""

from __future__ import annotations

import pathlib
from typing import Any

import cards
import models
import pytest
import torch
import torch.distributed as dist
from cards import needs_a_card, on_card

import fdp

pytestmark = needs_a_card


def interrupted(folder: str, sharded: bool, managed: bool) -> None:
    """Train six steps; train three, save, begin anew, load, train three more: the same bits, and the same draws."""
    rank, world = dist.get_rank(), dist.get_world_size()
    apply, params, buffers = fdp.from_module(models.mlp().cuda())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2)
    step = fdp.data_parallel(models.fdp_step(apply, rule))
    batches = list(models.batches("mlp", 6, 8))

    def start() -> Any:
        state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
        return fdp.shard(state, min_size=8) if sharded else fdp.replicate(state)

    def train(state: Any, part: slice) -> Any:
        for batch in batches[part]:
            batch = on_card(models.shard(batch, world, rank))
            batch["x"] = batch["x"] + torch.rand(batch["x"].shape, device="cuda")
            state, _ = step(state, batch)
        return state

    def draws() -> torch.Tensor:
        return torch.rand(4, device="cuda")

    torch.manual_seed(rank)
    whole = train(start(), slice(6))
    after = draws()

    torch.manual_seed(rank)
    own = fdp.per_rank(torch.full((3,), float(rank), device="cuda"))
    kept: dict[str, Any] = {"state": train(start(), slice(3)), "own": own}
    like: dict[str, Any] = {"state": start(), "own": fdp.per_rank(torch.zeros(3, device="cuda"))}
    if managed:
        with fdp.CheckpointManager(folder) as manager:
            manager.save(3, kept)
        torch.manual_seed(100)
        with fdp.CheckpointManager(folder) as manager:
            found, at = manager.restore(like)
            assert at == 3
    else:
        fdp.save(folder, kept, random=True)
        torch.manual_seed(100)
        found = fdp.load(folder, like, random=True)
    assert torch.equal(found["own"].value.cpu(), torch.full((3,), float(rank)))
    again = train(found["state"], slice(3, 6))
    for one, two in zip(fdp.pytree.flatten(whole)[0], fdp.pytree.flatten(again)[0], strict=True):
        assert type(one) is type(two) and one.device == two.device
        one, two = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (one, two))
        assert torch.equal(one, two)
    assert torch.equal(after, draws())


@pytest.mark.parametrize("managed", [False, True], ids=["save", "manager"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("backend", [cards.BACKEND, "nccl"])
def test_an_interrupted_run_goes_on(backend: str, sharded: bool, managed: bool, tmp_path: pathlib.Path) -> None:
    cards.run(2, interrupted, str(tmp_path / "saved"), sharded, managed, backend=backend)
