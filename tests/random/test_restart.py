"""Seeds, and a run that goes on after a restart as if it had not stopped: bit for bit, dropout and all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import fdp
from fdp.distributed.fingerprint import fingerprint


def test_a_seed_repeats_and_neighbours_have_nothing_in_common() -> None:
    drawn = {}
    for n in (0, 1, 2, -1, 2**63 + 1):
        own = fdp.seed(n)
        drawn[own] = torch.rand(2).tolist()
        assert fdp.seed(n) == own and torch.rand(2).tolist() == drawn[own] and torch.initial_seed() == own
        assert 0 <= own < 2**63
    assert len({tuple(values) for values in drawn.values()}) == 5


def test_a_seed_leaves_the_generators_of_python_and_numpy() -> None:
    before = random.getstate(), str(numpy.random.get_state())
    fdp.seed(3)
    assert (random.getstate(), str(numpy.random.get_state())) == before


def test_seeds_that_mean_nothing_are_refused() -> None:
    for n in (1.0, "a", True, None):
        with pytest.raises(fdp.ArgumentError, match=r"fdp\.seed was given .*\nRemedy: pass a Python integer\."):
            fdp.seed(n)  # type: ignore[arg-type]

    def step(state: Any, batch: Any) -> Any:
        fdp.seed(0)
        return state

    with pytest.raises(fdp.FdpError, match=r"fdp\.seed was called inside a step"):
        fdp.data_parallel(step)(torch.ones(1), torch.ones(1))


class Training:
    """A small network with dropout, under AdamW, with noise on its loss that all ranks share."""

    def __init__(self) -> None:
        torch.manual_seed(5)  # the same parameters on every rank
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        self.apply, params, self.buffers = fdp.from_module(model)
        self.optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.05)
        self.state: Any = {"params": params, "opt": self.optimizer.init(params), "key": fdp.random.key(1)}
        self.step = fdp.data_parallel(self.one_step, donate_argnums=0)

    def one_step(self, state: Any, batch: torch.Tensor) -> Any:
        following, here = fdp.random.split(state["key"])

        def loss_fn(params: Any) -> torch.Tensor:
            output, _ = self.apply(params, self.buffers, batch)
            return (output - fdp.random.normal(here, output.shape)).square().mean()

        grads = fdp.grad(loss_fn)(state["params"])
        params, opt = self.optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt, "key": following}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.rand(8, 4) + random.random() + float(numpy.random.rand())
            self.state = self.step(self.state, batch)

    def bits(self) -> list[int]:
        drawn = [torch.rand(3), torch.tensor([random.gauss(0, 1), numpy.random.randn()], dtype=torch.float64)]
        return [fingerprint(leaf) for leaf in [*optree.tree_leaves(self.state), *drawn]]


def run_with_a_save(path: str) -> list[int]:
    rank = dist.get_rank()
    training = Training()
    fdp.seed(7)
    random.seed(rank), numpy.random.seed(rank)
    random.gauss(0, 1), numpy.random.randn()  # each keeps a second number for later
    training.run(3)
    fdp.save(path, training.state, random=True)
    training.run(3)
    fdp.assert_replicated(training.state)
    return training.bits()


def run_from_the_save(path: str, seeds: int) -> list[int]:
    training = Training()
    fdp.seed(seeds), random.seed(seeds), numpy.random.seed(seeds)
    training.state = fdp.load(path, like=training.state, random=True)
    training.run(3)
    bits = training.bits()
    fdp.save(path + "-some", training.state, random=dist.get_rank() == 0)
    with pytest.raises(fdp.ArgumentError, match="holds that of only 1 of 2 ranks, and this is one of 2"):
        fdp.load(path + "-some", like=training.state, random=True)  # on both, and neither waits for the other
    return bits


def test_a_restarted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "step-3")
    in_one_go = ranks.run(2, run_with_a_save, path)
    assert in_one_go[0][:-2] == in_one_go[1][:-2]  # the state
    assert in_one_go[0][-2:] != in_one_go[1][-2:]  # what the ranks' own generators draw next
    restarted = ranks.run_fresh(2, run_from_the_save, path, 1234)
    assert [outcome.value for outcome in restarted] == in_one_go, [outcome.describe() for outcome in restarted]

    # One rank has no use for the generators of two, but for the state.
    like = Training().state
    with pytest.raises(fdp.ArgumentError, match="holds that of 2 ranks, and this is one of 1") as caught:
        fdp.load(path, like, random=True)
    assert "Remedy: load it with random=False, and call fdp.seed" in str(caught.value)
    loaded = fdp.load(path, like)
    assert int(loaded["key"]) == int(fdp.load(path, like)["key"]) != int(like["key"])


def test_generators_of_a_world_of_one_and_none_saved(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    fdp.save(tmp_path / "with", state, random=True)
    drawn = torch.rand(2), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()
    fdp.load(tmp_path / "with", state)
    assert not torch.equal(torch.rand(2), drawn[0])  # not asked for
    loaded = fdp.load(tmp_path / "with", state, random=True)
    assert torch.equal(loaded["w"], state["w"])
    again = torch.rand(2), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()
    assert torch.equal(again[0], drawn[0]) and again[1:] == drawn[1:]

    fdp.save(tmp_path / "without", state)
    before = torch.get_rng_state()
    with pytest.raises(fdp.ArgumentError, match=r"set the state of generators; the checkpoint in .* holds none"):
        fdp.load(tmp_path / "without", state, random=True)
    assert torch.equal(torch.get_rng_state(), before)
