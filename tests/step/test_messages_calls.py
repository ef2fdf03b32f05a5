"""The text of refusals: calls where they have no meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusal_texts import check, raised, run

import fdp

Tree = Any


def step(state: Tree, batch: Tree) -> Tree:
    return {"w": state["w"] + fdp.pmean(batch["x"].sum(0))}


X = torch.ones(2)


def test_the_derivative_of_a_maximum() -> None:
    remedy = "Remedy: detach its argument, or write the maximum over fdp.all_gather(...)."
    for collective, name in ((fdp.pmax, "pmax"), (fdp.pmin, "pmin")):
        what = "was differentiated, and has no derivative here."

        def loss_fn(p: Tree, collective: Any = collective) -> torch.Tensor:
            return collective({"w": p})["w"].sum()

        def train(state: Tree, batch: Tree, loss_fn: Any = loss_fn) -> Tree:
            return fdp.grad(loss_fn)(state["w"])

        check(fdp.FdpError, lambda f=loss_fn: fdp.grad(f)(X), f"{name}(['w']) {what}\n{remedy}")
        check(fdp.FdpError, run(train), f"{name}(['w']) {what}\n  in step 'train', LINE in train\n{remedy}")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_a_step_under_a_transform(transform: Callable[..., Any], warm: bool) -> None:
    train = fdp.data_parallel(lambda state, batch: (state * 2).sum() + 0 * fdp.pmean(batch.sum()))
    if warm:
        train(torch.ones(2), torch.ones(1))
    text = """
step '<lambda>' was called inside torch.func.grad, vmap or another transform, which cannot see into it.
Remedy: differentiate inside the step; or transform the function that it was made from: step.__wrapped__."""
    state = torch.ones(3, 2) if transform is torch.func.vmap else torch.ones(2)
    check(fdp.FdpError, lambda: transform(lambda w: train(w, torch.ones(1)))(state), text)
    found = transform(lambda w: train.__wrapped__(w, torch.ones(1)))(state)
    assert found.shape == ((3,) if transform is torch.func.vmap else (2,))


@pytest.mark.parametrize("name", ["replicate", "assert_replicated"])
def test_what_belongs_outside_of_a_step(name: str) -> None:
    kind, text = raised(run(lambda state, batch: getattr(fdp, name)(state)))
    assert kind is fdp.FdpError
    assert text.splitlines()[0].startswith(f"fdp.{name} was called inside ")
    assert text.splitlines()[-1] == (
        "Remedy: call it outside; inside a step use fdp.broadcast, or return the value and compare it outside."
    )


def test_the_graph_of_a_trace_is_not_for_running() -> None:
    trace = fdp.data_parallel(step).trace({"w": X}, {"x": X[None]})
    text = """
a collective of a traced step was run by itself.
Remedy: run what Plan.emit() returns, not the graph of the trace."""
    check(fdp.FdpError, lambda: trace.graph(X, X[None]), text)
