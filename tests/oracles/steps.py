"""Steps that several test files call: the smallest, descent on any parameters, layers with dropout under AdamW."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import torch

import fdp

Tree = dict[str, Any]


def shifted(state: Any, batch: Any) -> Any:
    """The smallest step: adds the mean of the batch to every leaf of the state."""
    mean = fdp.pmean(batch.mean())
    return optree.tree_map(lambda leaf: leaf + mean if isinstance(leaf, torch.Tensor) else leaf, state)


def sgd_step(state: Tree, batch: Tree) -> Tree:
    """A step on any flat dict of parameters: each times the batch's sum, squared and averaged."""

    def loss_fn(params: Tree) -> torch.Tensor:
        return sum((p.double() * batch["x"].double().sum() + 1).square().mean() for p in params.values())

    grads = fdp.grad(loss_fn)(state)
    return {k: state[k] - 0.01 * grads[k] for k in state}


OPTIMIZER = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)


def make_state(sizes: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    params = {f"w{i}": torch.randn(a, b) * 0.05 for i, (a, b) in enumerate(itertools.pairwise(sizes))}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train(state: dict[str, Any], batch: torch.Tensor) -> Any:
    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch
        for w in params.values():
            x = torch.nn.functional.dropout((x @ w).relu(), 0.1)
        return x.square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
    params, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": params, "opt": opt}, fdp.pmean(loss)
