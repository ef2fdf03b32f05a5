"""What makes the first state of a run gives it memory of its own: a donated state is overwritten, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import fdp
from fdp import pytree
from fdp.pytorch.tensors import storage_id

Tree = Any

FIRST_STATES: dict[str, Callable[[Tree], Tree]] = {
    "replicate": fdp.replicate,
    "per_rank": fdp.per_rank,
    "shard": lambda tree: fdp.shard(tree, min_size=4),
    "unshard": lambda tree: fdp.unshard(fdp.shard(tree, min_size=4)),
    "unshard, of whole leaves": fdp.unshard,
}


def memory_of(tree: Tree) -> set[int]:
    """The pieces of memory that tensors of a tree lie in."""
    with torch.no_grad():
        parts = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in pytree.leaves_of(tree)]
    return {storage_id(part.untyped_storage()) for part in parts if isinstance(part, torch.Tensor)}


def parameters() -> Tree:
    """A large leaf and a small one, one that repeats an element, one laid out in columns, and a module's parameter."""
    return {
        "large": torch.arange(8.0).view(4, 2),
        "small": torch.ones(2),
        "repeated": torch.ones(1).expand(4),
        "columns": torch.arange(8.0).view(2, 4).t(),
        "of a module": nn.Linear(2, 2).weight,
    }


def lies_elsewhere(make: str) -> None:
    before = parameters()
    made = FIRST_STATES[make](before)
    assert not memory_of(made) & memory_of(before)
    if make.startswith("unshard"):
        assert not memory_of(fdp.unshard(made)) & memory_of(made)
    expected = {name: leaf.detach() for name, leaf in parameters().items() if name != "of a module"}
    found = fdp.unshard(made)
    for name, leaf in expected.items():
        value = found[name].value if isinstance(found[name], fdp.PerRank) else found[name]
        assert torch.equal(value, leaf) and not value.requires_grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", FIRST_STATES)
def test_it_lies_elsewhere(make: str, world: int) -> None:
    ranks.run(world, lies_elsewhere, make)


def trained_twice(make: str) -> list[Tree]:
    """The losses of two runs from the same parameters, of a state that is donated."""

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Tree, x: torch.Tensor) -> tuple[Tree, torch.Tensor]:
        grads, value = torch.func.grad_and_value(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(state)
        grads = fdp.pmean(grads) if make != "per_rank" else grads
        return {name: p - 0.1 * grads[name] for name, p in state.items()}, fdp.pmean(value)

    params = {"w": torch.linspace(-1, 1, 8).view(4, 2), "b": torch.zeros(2)}
    runs = []
    for _ in range(2):
        state, losses = FIRST_STATES[make](params), []
        for call in range(3):
            state, loss = step(state, torch.full((3, 4), 1.0 + call + int(fdp.axis_index())))
            losses.append(float(loss))
        runs.append(losses)
    assert not params["b"].any()
    return runs


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", ["replicate", "per_rank", "shard"])
def test_a_second_run_begins_where_the_first_did(make: str, world: int) -> None:
    for one, two in ranks.run(world, trained_twice, make):
        assert one == two and one[0] != one[1]
