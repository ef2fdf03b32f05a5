"""Gradients at labelled parameters: a mean of gradients that ranks take at different places is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from samples import some

import fdp

Tree = Any


def loss(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"]) ** 2).mean()


AVERAGED: dict[str, Callable[[Tree, torch.Tensor], Tree]] = {
    "grad": lambda state, x: fdp.grad(loss)(state["own"], x),
    "value_and_grad": lambda state, x: fdp.value_and_grad(loss)(state["own"], x)[1],
    "beside others": lambda state, x: fdp.grad(lambda p: loss(p["a"], x) + loss(p["b"], x))(
        {"a": state["shared"], "b": state["own"]}
    )["b"],
    "accumulated": lambda state, x: fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)(state["own"], x)[1],
    "detached": lambda state, x: fdp.grad(loss)({"w": state["own"]["w"].detach()}, x),
    "in a gradient": lambda state, x: torch.func.grad(lambda p: fdp.value_and_grad(loss)(p, x)[0])(state["own"]),
    "in vmap": lambda state, x: torch.func.vmap(lambda row: fdp.grad(loss)(state["own"], row))(x),
    "over vmap": lambda state, x: torch.func.vmap(lambda w: fdp.grad(loss)({"w": w.view(4, 1)}, x))(
        state["own"]["w"].t()
    ),
    "through a reshape": lambda state, x: fdp.grad(lambda p: loss({"w": p.view(4, 2)}, x))(state["own"]["w"].view(-1)),
}


def refused(name: str, compile: bool) -> str:
    @fdp.data_parallel(compile=compile)
    def step(state: Tree, x: torch.Tensor) -> Tree:
        return {**state, "grads": fdp.per_rank(AVERAGED[name](state, x))}

    state = {"own": fdp.per_rank({"w": torch.ones(4, 2)}), "shared": {"w": torch.ones(4, 2)}}
    with pytest.raises(fdp.ReplicationError) as caught:
        step(state, torch.ones(6, 4))
    return str(caught.value)


@pytest.mark.parametrize("compile", some([False, True]))
@pytest.mark.parametrize("name", AVERAGED)
def test_it_is_refused(name: str, compile: bool) -> None:
    for world in (1, 2):
        for text in ranks.run(world, refused, name, compile):
            first, *_, last = text.splitlines()
            assert "at parameters that are each rank's own" in first
            assert "state['own']['w'], which is labelled" in text and "state['shared']" not in text
            assert "in step 'step'" in text
            assert last.startswith("Remedy: ") and "torch.func.grad" in last and "fdp.pmean" in last


def refused_outside() -> str:
    params = {"own": fdp.per_rank({"w": torch.ones(4, 2)}), "shared": {"w": torch.ones(4, 2)}}
    with pytest.raises(fdp.ReplicationError) as caught:
        fdp.value_and_grad(lambda p: p["shared"]["w"].sum())(params)
    return str(caught.value)


def test_it_is_refused_outside_of_a_step() -> None:
    for text in (refused_outside(), *ranks.run(2, refused_outside)):
        assert "p['own']['w']: labelled" in text and "p['shared']" not in text


def other_gradients() -> None:
    """Those that are meant: each rank's own, their mean, one at replicated parameters, one at what a step has made."""
    rank, x = int(fdp.axis_index()), torch.arange(24.0).view(6, 4) / 10
    own = {"w": torch.full((4, 2), 1.0 + rank)}

    @fdp.data_parallel
    def step(state: Tree, x: torch.Tensor) -> Tree:
        local = torch.func.grad(loss)(state["own"], x)
        adapted = {"w": state["shared"]["w"] - 0.1 * torch.func.grad(loss)(state["shared"], x)["w"]}
        found = {
            "mean": fdp.pmean(local),
            "shared": fdp.grad(loss)(state["shared"], x),
            "adapted": fdp.grad(loss)(adapted, x),
            "copy": fdp.grad(loss)({"w": state["own"]["w"] * 1.0}, x),
        }
        return {**state, "found": found, "local": fdp.per_rank(local)}

    def at(w: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(loss)({"w": w}, x)["w"]

    out = step({"own": fdp.per_rank(own), "shared": {"w": torch.ones(4, 2)}}, x)
    each = [torch.full((4, 2), 1.0 + other) for other in range(fdp.axis_size())]
    mean = sum(at(w) for w in each) / len(each)
    shared = at(torch.ones(4, 2))
    for name, expected in (("mean", mean), ("shared", shared), ("copy", mean)):
        torch.testing.assert_close(out["found"][name]["w"], expected)
    torch.testing.assert_close(out["found"]["adapted"]["w"], at(torch.ones(4, 2) - 0.1 * shared))
    torch.testing.assert_close(out["local"]["w"], at(own["w"]))


@pytest.mark.parametrize("world", [1, 2])
def test_other_gradients_are_what_they_were(world: int) -> None:
    ranks.run(world, other_gradients)
