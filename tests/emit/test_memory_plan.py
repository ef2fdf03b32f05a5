"""`MemoryPlan`: all that is decided about memory, as one value that nobody can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from fake_ranks import fake_group
from proved_steps import STEPS
from torch import fx

import fdp
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.savings import ALL, COMPILER, NONE, Savings
from fdp.plan import Plan


def train_step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((batch @ params["a"]).tanh() @ params["b"]).square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)({name: state[name] for name in "ab"})
    momentum = {name: 0.9 * state[f"m{name}"] + grads[name] for name in "ab"}
    new = {name: state[name] - 0.1 * momentum[name] for name in "ab"}
    return {**new, **{f"m{name}": momentum[name] for name in "ab"}}, fdp.pmean(loss)


def planned(world: int = 2, savings: Savings = ALL) -> MemoryPlan:
    state = {name: torch.eye(32) for name in ("a", "b", "ma", "mb")}
    step = fdp.data_parallel(train_step, group=fake_group(world), bucket_cap_mb=0.002, donate_argnums=0)
    return plan_memory(step.plan(state, torch.ones(16, 32)), world > 1, savings)


def with_everything(savings: Savings) -> MemoryPlan:
    step, state, options = STEPS["everything"]
    transformed = fdp.data_parallel(step, group=fake_group(2), check_replication=False, donate_argnums=0, **options)
    return plan_memory(transformed.plan(state, torch.ones(4, 4)), True, savings)


# Frozen.


VALUES = (int, float, str, type(None), torch.dtype, torch.device, torch.Tensor, fx.Node, torch._ops.OpOverload, Plan)


def changeable(value: Any, path: str) -> Iterator[str]:
    """The parts of a value that can be changed, by where they are; each is tried."""
    if isinstance(value, VALUES):
        return  # what a plan consists of: itself no part of this one
    if isinstance(value, (tuple, frozenset)):
        for at, item in enumerate(value):
            yield from changeable(item, f"{path}[{at}]")
    elif isinstance(value, Mapping):
        try:
            value["anything"] = 0  # type: ignore[index]
        except TypeError:
            pass
        else:
            yield path
        for key, item in value.items():
            yield from changeable(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            try:
                setattr(value, field.name, part)
            except dataclasses.FrozenInstanceError:
                pass
            else:
                yield f"{path}.{field.name}"
            yield from changeable(part, f"{path}.{field.name}")
    else:
        yield path


@pytest.mark.parametrize("savings", [ALL, COMPILER, NONE], ids=["all", "compiler", "none"])
@pytest.mark.parametrize("make", [lambda savings: planned(2, savings), with_everything], ids=["training", "everything"])
def test_no_part_of_it_can_be_changed(make: Any, savings: Savings) -> None:
    assert list(changeable(make(savings), "plan")) == []


def test_a_part_that_can_be_changed_is_found() -> None:
    memory = planned()
    for name in ("markers", "layouts"):
        assert f"plan.{name}" in list(changeable(dataclasses.replace(memory, **{name: {}}), "plan"))
    opened = dataclasses.replace(memory.placement, copies=dict(memory.placement.copies), returned=[])
    found = list(changeable(dataclasses.replace(memory, placement=opened), "plan"))
    assert found == ["plan.placement.copies", "plan.placement.returned"]
