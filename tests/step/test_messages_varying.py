"""The text of refusals: outputs that may differ between ranks."""

from __future__ import annotations

import re
from typing import Any

import torch
from fake_ranks import fake_group
from refusal_texts import check, check_facts, raised, run
from torch import nn

import fdp

Tree = Any

REPLICATE = (
    "Remedy: average them with fdp.pmean (or fdp.psum, fdp.pmax, fdp.broadcast); declare those that are meant to "
    "differ with fdp.per_rank."
)
REPLICATE_OR_DRAW = REPLICATE.replace("declare", "draw what is to be equal on all ranks with fdp.random; declare")


def test_outputs_that_vary() -> None:
    """All of them, in one message; not those that are averaged or declared."""

    def train(state: Tree, batch: Tree) -> Tree:
        noise = torch.rand_like(state["w"])
        local = batch["x"].sum(0)
        new = {"w": state["w"] + local, "noise": noise}
        return new, batch["x"], fdp.pmean(local), fdp.per_rank(local), [fdp.axis_index()]

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[0]['noise']: [2] torch.float32, last varied in aten.rand_like.default at LINE in train
  output[0]['w']: [2] torch.float32, last varied in aten.add.Tensor at LINE in train
  output[1]: [4, 2] torch.float32, is the batch argument batch['x'] itself
  output[4][0]: [] torch.int64, last varied in fdp.axis_index.default at LINE in train
{REPLICATE_OR_DRAW}"""
    check(fdp.ReplicationError, run(train), text)
    # Also when it is only planned, and for ranks that are not there.
    arguments = {"w": torch.ones(2)}, {"x": torch.ones(4, 2)}
    check(fdp.ReplicationError, lambda: fdp.data_parallel(train, group=fake_group(8)).plan(*arguments), text)


def test_a_missing_average_of_the_loss() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        loss, grads = fdp.value_and_grad(lambda p: (batch["x"] @ p["w"]).mean())(state)
        return grads, {"loss": loss}

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[1]['loss']: [] torch.float32, last varied in aten.mean.default at LINE in <lambda>
{REPLICATE}"""
    check(fdp.ReplicationError, run(train), text)


def test_noise_in_an_update() -> None:
    """Who drew it, also behind an optimizer that takes all gradients at once."""
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def private(state: Tree, batch: Tree) -> Tree:
        grads = fdp.grad(lambda p: (batch["x"] @ p["w"]).mean())(state["params"])
        noisy = {"w": grads["w"] + torch.empty_like(grads["w"]).normal_()}
        return optimizer.update(noisy, state["opt"], state["params"])[0]

    params = {"w": torch.ones(2)}
    text = f"""
step 'private' returns values that may differ from rank to rank.
  output['w']: [2] torch.float32, last varied in OPERATOR at LINE in private, only by the random numbers of \
aten.normal_.default at LINE in private
{REPLICATE_OR_DRAW}"""
    state = {"params": params, "opt": optimizer.init(params)}
    kind, found = raised(run(private, state))
    assert kind is fdp.ReplicationError
    check_facts(re.sub(r"varied in aten\.\S+", "varied in OPERATOR", found), text)


def test_batches_and_random_numbers_together() -> None:
    """Random numbers are not said to be all, whichever came first, and whichever wrote into the other's memory."""

    def train(state: Tree, batch: Tree) -> Tree:
        filled = torch.rand(2)
        filled[:1] = batch["x"][0, :1]
        over = batch["x"][0].clone()
        over[:1] = torch.rand(1)
        again = batch["x"][0].clone().uniform_()
        return [torch.dropout(batch["x"], 0.5, True).sum(), filled, over, again]

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[0]: [] torch.float32, last varied in aten.sum.default at LINE in train
  output[1]: [2] torch.float32, last varied in aten.copy_.default at LINE in train
  output[2]: [2] torch.float32, last varied in aten.copy_.default at LINE in train
  output[3]: [2] torch.float32, last varied in aten.uniform_.default at LINE in train
{REPLICATE_OR_DRAW}"""
    check(fdp.ReplicationError, run(train), text)


def test_statistics_of_batch_norm_that_drift_apart() -> None:
    apply, params, buffers = fdp.from_module(nn.BatchNorm1d(2))

    def train(state: Tree, batch: Tree) -> Tree:
        return apply(params, state, batch["x"])[1]

    for p in params.values():
        p.requires_grad_(False)
    text = f"""
step 'train' returns values that may differ from rank to rank.
  output['running_mean']: [2] torch.float32, last varied in aten.native_batch_norm.default at LINE in train
  output['running_var']: [2] torch.float32, last varied in aten.native_batch_norm.default at LINE in train
{REPLICATE}"""
    check(fdp.ReplicationError, run(train, state=buffers), text)


def test_what_was_declared_and_then_changed() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return fdp.per_rank(batch["x"].sum()) * 2

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output: [] torch.float32, last varied in aten.mul.Tensor at LINE in train
{REPLICATE}"""
    check(fdp.ReplicationError, run(train), text)


def test_a_step_that_takes_state_alone() -> None:
    """Its only argument is a batch by default: the remedy says how to have none."""

    def meet(state: Tree, times: int = 1) -> Tree:
        return {"w": state["w"] * times, "mean": fdp.pmean(state["w"])}

    remedy = REPLICATE.replace("declare", "pass batch_argnums=() if no argument is a batch; declare")
    of_batch = f"""
step 'meet' returns values that may differ from rank to rank.
  output['w']: [2] torch.float32, last varied in aten.mul.Tensor at LINE in meet
{remedy}"""
    state = {"w": torch.ones(2)}
    check(fdp.ReplicationError, lambda: fdp.data_parallel(meet)(state), of_batch)
    constant = fdp.data_parallel(meet, batch_argnums=0, static_argnums=1)
    check(fdp.ReplicationError, lambda: constant(state, 2), of_batch)
    assert fdp.data_parallel(meet, batch_argnums=())(state)["w"].tolist() == [1, 1]

    def draw(state: Tree) -> Tree:
        return torch.rand(2) + fdp.pmean(state["w"])

    of_draws = f"""
step 'draw' returns values that may differ from rank to rank.
  output: [2] torch.float32, last varied in aten.add.Tensor at LINE in draw, only by the random numbers of \
aten.rand.default at LINE in draw
{REPLICATE_OR_DRAW}"""
    check(fdp.ReplicationError, lambda: fdp.data_parallel(draw)(state), of_draws)
