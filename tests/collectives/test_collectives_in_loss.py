"""Collectives inside a loss, their transposes, and exact means over uneven batches: against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from against_oracle import DOUBLE, Tree, autograd, compare, leaves, task_loss
from samples import exhaustive


def several_means() -> None:
    """A global batch mean and variance inside the loss (synchronized normalization), and means of metrics."""
    import fdp

    def normalized_loss(hidden: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, y: torch.Tensor) -> Any:
        normal = (hidden - mean) / torch.sqrt(square - mean**2 + 1e-3)
        return ((normal.tanh().sum(1) - y) ** 2).mean()

    def step_fn(params: Tree, batch: Tree) -> Any:
        def loss_fn(params: Tree) -> Any:
            hidden = batch["ax"] @ params["w1"] + params["b1"]
            mean = fdp.pmean(hidden.mean(0))
            square = fdp.pmean((hidden**2).mean(0))
            return normalized_loss(hidden, mean, square, batch["ay"]), {"mean": mean, "top": hidden.max()}

        (loss, aux), grads = fdp.value_and_grad(loss_fn, has_aux=True)(params)
        return fdp.pmean(loss), grads, {"mean": aux["mean"], "top": fdp.pmax(aux["top"])}

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        hidden = torch.cat([s["ax"] for s in shards]) @ params["w1"] + params["b1"]
        y = torch.cat([s["ay"] for s in shards])
        loss = normalized_loss(hidden, hidden.mean(0), (hidden**2).mean(0), y)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        aux = {"mean": hidden.mean(0).detach(), "top": hidden.max().detach()}
        return loss.detach(), dict(zip(params, grads, strict=True)), aux

    compare(step_fn, oracle)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=exhaustive)])
def test_several_means(world: int) -> None:
    ranks.run(world, several_means)


def across(op: str, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets from a collective, in one process."""
    stacked = torch.stack(values)
    one = {"psum": stacked.sum(0), "pmean": stacked.mean(0), "all_gather": stacked, "broadcast": values[1]}[op]
    return [one] * len(values)


def transpose(op: str) -> None:
    """L = mean over ranks of <c_r, op(a_r * p) ** 2>: a wrong transpose mixes up c and a."""
    import fdp

    call_op = {"broadcast": lambda x: fdp.broadcast(x, root=1)}.get(op) or getattr(fdp, op)

    def local_loss(params: Tree, batch: Tree, collective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = collective(batch["ax"].mean(0) * params["p"])
        return ((y + batch["ay"][0]) ** 2 * batch["bx"][1]).sum()

    def step_fn(params: Tree, batch: Tree) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: local_loss(p, batch, call_op))(params)
        return fdp.pmean(loss), grads

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        given = across(op, [s["ax"].mean(0) * params["p"] for s in shards])
        losses = [local_loss(params, s, lambda _, y=y: y) for s, y in zip(shards, given, strict=True)]
        loss = sum(losses) / len(losses)
        return loss.detach(), autograd(loss, params)

    compare(step_fn, oracle, {"p": torch.tensor([0.5, -1.0, 2.0], dtype=DOUBLE)})


@pytest.mark.parametrize("op", ["psum", "pmean", "all_gather", "broadcast"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=exhaustive)])
def test_transposes(world: int, op: str) -> None:
    ranks.run(world, transpose, op)


def weighted_transpose() -> None:
    """`pmean(weight=)` inside a loss, differentiated in the values and in the weights."""
    import fdp

    def weight_of(params: Tree, batch: Tree) -> torch.Tensor:
        return (params["p"] * batch["bx"].mean(0)).sum().exp()

    def step_fn(params: Tree, batch: Tree) -> Any:
        def loss_fn(params: Tree) -> Any:
            y = fdp.pmean(batch["ax"].mean(0) * params["p"], weight=weight_of(params, batch))
            return (y**2 * batch["bx"][1]).sum()

        loss, grads = fdp.value_and_grad(loss_fn)(params)
        return fdp.pmean(loss), grads

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        weights = [weight_of(params, s) for s in shards]
        weighted = sum(w * s["ax"].mean(0) * params["p"] for w, s in zip(weights, shards, strict=True))
        y = weighted / sum(weights)
        loss = sum((y**2 * s["bx"][1]).sum() for s in shards) / len(shards)
        return loss.detach(), autograd(loss, params)

    compare(step_fn, oracle, {"p": torch.tensor([0.5, -1.0, 2.0], dtype=DOUBLE)})


def test_weighted_mean_is_differentiable() -> None:
    ranks.run(2, weighted_transpose)


def uneven(weight_from: str) -> None:
    import fdp

    def step_fn(params: Tree, batch: Tree) -> Any:
        grads, loss = torch.func.grad_and_value(task_loss)(params, batch["ax"], batch["ay"])
        # Written as torch.tensor(len(...)) it would be a constant of the trace that differs between ranks,
        # which is refused (step/test_bad_input.py); as a plain number it is known to be this rank's own.
        weight = len(batch["ay"]) if weight_from == "length" else torch.ones_like(batch["ay"]).sum()
        return fdp.pmean((loss, grads), weight=weight)

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        x, y = (torch.cat([s[k] for s in shards]) for k in ("ax", "ay"))
        loss = task_loss(params, x, y)
        return loss.detach(), autograd(loss, params)

    compare(step_fn, oracle, sizes=(3, 5))


@pytest.mark.parametrize("weight_from", ["length", pytest.param("tensor", marks=exhaustive)])
def test_weighted_mean_is_exact_for_uneven_batches(weight_from: str) -> None:
    """Ranks with 3 and 5 samples give what one process gives on all 8."""
    ranks.run(2, uneven, weight_from)
