"""A third kind of placement, in the table of containers for these tests alone: no other file knows of it.

What the rooms do with state they ask that table. So numbers that are kept in bfloat16, and which a step is given in
float32, go through traces, programs, comparisons, ranks, optimizers and checkpoints without a change of any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp
from fdp.state import containers
from fdp.state.containers import Container

Tree = Any


@dataclass(frozen=True, eq=False)
class Cold:
    """A leaf that takes half the memory outside of steps."""

    value: torch.Tensor


def apart(leaf: Cold) -> tuple[tuple[Any], None, tuple[str]]:
    value = leaf.value
    return (value.float() if isinstance(value, torch.Tensor) else value,), None, ("value",)


def together(rest: None, children: Iterable[Any]) -> Cold:
    (child,) = children
    return Cold(child.bfloat16() if isinstance(child, torch.Tensor) else child)


COLD = Container(
    adjective="cold",
    verb="cool",
    kind=Cold,
    told_by_type=True,
    apart=apart,
    together=together,
    tensor=lambda leaf: leaf.value,
    saved=lambda leaf: leaf.value,
)
containers.register(COLD, Cold)


@contextlib.contextmanager
def in_the_table() -> Iterator[None]:
    before = containers.CONTAINERS
    containers.CONTAINERS = (*before, COLD)  # type: ignore[assignment]
    try:
        yield
    finally:
        containers.CONTAINERS = before


@pytest.fixture
def third() -> Iterator[None]:
    with in_the_table():
        yield


def start() -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.3]).bfloat16()


def batch_of(rank: int, i: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).sub(2).mul(0.3 + 0.2 * rank).add(0.1 * i)


OPTIMIZER = fdp.optim.averaged(fdp.optim.from_torch(torch.optim.AdamW, lr=0.1), decay=0.5)


def train(state: Tree, batch: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    w = state["params"]["w"]
    assert isinstance(w, torch.Tensor) and w.dtype == torch.float32  # as a step sees it
    loss, grads = fdp.value_and_grad(lambda p: (batch @ p["w"]).square().mean())(state["params"])
    params, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": params, "opt": opt, "seen": state["seen"] + 1}, fdp.pmean(loss)


def state_of(rank: int) -> Tree:
    params = {"w": Cold(start())}
    return {"params": params, "opt": OPTIMIZER.init(params), "seen": fdp.per_rank(torch.tensor(10.0 * rank))}


def trained(rank: int, **options: Any) -> tuple[Tree, Any]:
    step = fdp.data_parallel(train, **options)
    state = state_of(rank)
    for i in range(4):
        state, _ = step(state, batch_of(rank, i))
        assert isinstance(state["params"]["w"], Cold) and state["params"]["w"].value.dtype == torch.bfloat16
    return state, step


def by_hand(world: int) -> torch.Tensor:
    """The same without the container: rounded by hand after each step."""
    params = {"w": start().float()}
    opt = OPTIMIZER.init(params)
    for i in range(4):
        w = params["w"]
        grads = [2 * x.t() @ (x @ w) / len(x) for x in (batch_of(rank, i) for rank in range(world))]
        params, opt = OPTIMIZER.update({"w": sum(grads) / world}, opt, params)
        params, opt["average"] = ({"w": tree["w"].bfloat16().float()} for tree in (params, opt["average"]))
    return params["w"].bfloat16()


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}])
def test_a_step_takes_and_returns_it(third: None, options: dict[str, Any]) -> None:
    state, step = trained(0, **options)
    assert torch.equal(state["params"]["w"].value, by_hand(1))
    assert step.traces == 1
    moments, average = state["opt"]["state"]["w"], state["opt"]["average"]["w"]
    assert isinstance(average, Cold) and moments["exp_avg"].dtype == torch.float32  # of what the step sees
    assert state["seen"].value.item() == 4
    trace = step.trace(state, batch_of(0, 0))
    assert {i.name: i.role for i in trace.inputs}["state['params']['w']"] == "state"  # without a word of the container
    assert "output[0]['params']['w']" in [o.name for o in trace.outputs if o.container is COLD]
    assert "cold" in str(trace)


def test_a_comparison_looks_into_it(third: None) -> None:
    seen: list[int] = []

    def wrong(state: Tree, batch: torch.Tensor) -> Tree:
        seen.append(1)  # a number that the trace freezes
        return {"w": state["w"] + fdp.pmean(batch.mean()) * len(seen)}

    with pytest.raises(fdp.TraceError, match=r"output\['w'\]"):
        fdp.data_parallel(wrong)({"w": Cold(start())}, torch.ones(2))


def test_what_is_done_outside_of_steps(third: None, tmp_path: Path) -> None:
    tree = {"w": Cold(start()), "n": 3}
    for copy in (fdp.replicate(tree), fdp.shard(tree, min_size=0)):
        assert isinstance(copy["w"], Cold) and torch.equal(copy["w"].value, start())
    assert fdp.replicate(tree)["w"].value is not tree["w"].value
    total = fdp.psum({"w": tree["w"]})["w"]
    assert torch.equal(total, start().float())
    with pytest.raises(fdp.ArgumentError, match=r"was given a cold leaf at \['w'\]"):
        fdp.per_rank(tree)
    fdp.save(tmp_path / "one", tree)
    found = fdp.load(tmp_path / "one", like={"w": Cold(torch.zeros(3).bfloat16()), "n": 0})
    assert isinstance(found["w"], Cold) and torch.equal(found["w"].value, start()) and found["n"] == 3
    with pytest.raises(fdp.ArgumentError, match=r"state\['w'\]: \[3\] torch.bfloat16 in the checkpoint"):
        fdp.load(tmp_path / "one", like={"w": torch.zeros(3), "n": 0})
    with fdp.CheckpointManager(tmp_path / "many") as manager:
        manager.save(1, tree)
        assert torch.equal(manager.restore(tree)[0]["w"].value, start())


def on_ranks() -> torch.Tensor:
    rank = dist.get_rank()
    with in_the_table():
        state, _ = trained(rank)
        fdp.assert_replicated(state)
        other = {"w": Cold(start() * (1 + rank))}
        with pytest.raises(fdp.ReplicationError, match=r"tree\['w'\]: rank 1 of 2"):
            fdp.assert_replicated(other)
        assert torch.equal(fdp.replicate(other)["w"].value, start())
        step = fdp.data_parallel(lambda s, b: {"w": s["w"] + fdp.pmean(b.sum())})
        with pytest.raises(fdp.ReplicationError, match=r"s\['w'\]: rank 1 differs"):
            step(other, torch.ones(2))
        mixed = {"w": Cold(start()) if rank else start().float()}
        for call in (fdp.replicate, lambda tree: step(tree, torch.ones(2))):
            with pytest.raises(fdp.AgreementError) as caught:
                call(mixed)
            assert "rank 1: " in str(caught.value) and "cold" in str(caught.value)
    return state["params"]["w"].value


def test_ranks_compare_it_and_give_it_to_each_other() -> None:
    one, two = ranks.run(2, on_ranks)
    assert torch.equal(one, two) and torch.equal(one, by_hand(2))
