"""What was each rank's own does not come in again as replicated state, unless it is labelled or was made equal."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive
from ways import WAYS

import fdp
from fdp.state import rank_local

Tree = Any


def momentum_step(state: Tree, batch: torch.Tensor) -> Tree:
    """Row 10: what is declared as each rank's own is read as if it were replicated."""
    g = (batch - state["w"]).mean(0)
    return {"w": state["w"] - 0.1 * state["m"], "m": fdp.per_rank(g)}


def refused(step: Any, *args: Any) -> str:
    with pytest.raises(fdp.ReplicationError) as caught:
        step(*args)
    return str(caught.value)


def what_comes_back_unlabelled(way: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = fdp.data_parallel(momentum_step, **WAYS[way])
    other = fdp.data_parallel(lambda m, batch: m.sum() + fdp.pmean(batch.mean()))
    batch = torch.full((2, 3), 1.0 + rank)
    state = step({"w": torch.zeros(3), "m": torch.zeros(3)}, batch)
    text = refused(step, state, batch)
    assert text.splitlines()[:2] == [
        "step 'momentum_step' was called with each rank's own tensors in the place of replicated state.",
        "  state['m']: [3] torch.float32, was output['m'] of step 'momentum_step'",
    ]
    assert "state[...] = fdp.per_rank(state[...])" in text.splitlines()[-1]
    m = state["m"]
    for same in (m, m.detach(), m[1:], m.view(3, 1), torch.from_numpy(m.numpy()), torch.from_numpy(m.numpy()[1:])):
        assert "was output['m'] of step 'momentum_step'" in refused(other, same, batch)
    assert "closed-over tensor m" in refused(fdp.data_parallel(lambda b: m + fdp.pmean(b.mean(0))), batch)
    # As a batch it may go in, labelled as well; and so may values of its own that are equal everywhere.
    assert fdp.data_parallel(lambda w, m: w + fdp.pmean(m))(torch.zeros(3), m).tolist() == (
        [1.5] * 3 if dist.is_initialized() else [1.0] * 3
    )
    for fine in (fdp.replicate(m), fdp.pmean(m), torch.zeros(3)):
        other(fine, batch)
    local = fdp.data_parallel(lambda s, b: {"m": s["m"] + 1, "w": fdp.pmean(b.mean(0))}, **WAYS[way])
    out = local({"m": fdp.per_rank(m), "w": torch.zeros(3)}, batch)
    assert out["m"].value.tolist() == [2.0 + rank] * 3
    # Nor may what a label held.
    assert "was the value of the labelled output['m'] of step '<lambda>'" in refused(other, out["m"].value, batch)


@pytest.mark.parametrize("way", [pytest.param(way, marks=exhaustive if "compiled" in way else ()) for way in WAYS])
def test_what_came_out_as_each_ranks_own_does_not_go_in_as_replicated(way: str) -> None:
    ranks.run(2, what_comes_back_unlabelled, way)
    what_comes_back_unlabelled(way)


def test_without_check_replication_nothing_is_refused() -> None:
    step = fdp.data_parallel(momentum_step, check_replication=False)
    state = {"w": torch.zeros(3), "m": torch.zeros(3)}
    for _ in range(3):
        state = step(state, torch.ones(2, 3))
    assert state["w"].tolist() != [0.0] * 3


def memory_that_is_replicated_again() -> None:
    rank = dist.get_rank()
    batch = torch.full((3,), 1.0 + rank)
    step = fdp.data_parallel(lambda s, b: (s + 1, fdp.per_rank(b * 1)))
    other = fdp.data_parallel(lambda s, b: s + fdp.pmean(b))
    _, mine = step(torch.zeros(3), batch)
    refused(other, mine, batch)
    # By hand, and found to be equal.
    dist.broadcast(mine, 0)
    fdp.assert_replicated(mine)
    assert other(mine, batch).tolist() == [2.5] * 3
    # By a step that it was donated to as a batch.
    _, mine = step(torch.zeros(3), batch)
    mean = fdp.data_parallel(lambda s, b: (s, fdp.pmean(b)), donate_argnums=1)
    again = mean(torch.zeros(1), mine)[1]
    assert again is mine and other(again, batch).tolist() == [3.0] * 3
    # By a step that returns a mean in a labelled place.
    label = fdp.data_parallel(lambda s, b: {"x": fdp.pmean(s["x"])}, donate_argnums=0)
    out = label({"x": fdp.per_rank(batch.clone())}, batch)
    assert other(out["x"].value, batch).tolist() == [3.0] * 3


def test_memory_that_holds_replicated_values_again_may_go_in() -> None:
    ranks.run(2, memory_that_is_replicated_again)


def test_a_label_of_what_is_replicated_as_well_makes_nothing_refused() -> None:
    # Local models start as the shared one, and may share its memory.
    w = torch.ones(3)
    for donate in ((), 0):
        step = fdp.data_parallel(lambda s, b: {**s, "n": s["n"] + 1}, donate_argnums=donate)
        state = {"w": w, "mine": fdp.per_rank(w), "n": torch.zeros(())}
        for _ in range(3):
            state = step(state, torch.ones(1))
        assert state["n"] == 3 and state["mine"] == fdp.per_rank(w)
    passed_on = fdp.data_parallel(lambda s, b: {"mine": s["mine"]})
    mine = fdp.per_rank(w)
    for _ in range(2):
        mine = passed_on({"w": w, "mine": mine}, torch.ones(1))["mine"]
    # Nor is a state that is returned declared as well.
    copies = fdp.data_parallel(lambda s, b: fdp.per_rank(s))
    copies(w, torch.ones(1))
    copies(w, torch.ones(1))


def test_memory_that_is_given_to_others_is_forgotten() -> None:
    step = fdp.data_parallel(lambda s, b: (s * 1, fdp.per_rank(b * 2)))
    state = torch.zeros(1000)
    places = set()
    for i in range(300):
        state, mine = step(state, torch.full((1000,), float(i)))
        places.add(mine.data_ptr())
        del mine
        state = state.clone()  # often lies where a result lay
    assert len(rank_local.notes) <= 129 and state.data_ptr() != 0
    kept = [step(state, torch.ones(1000))[1] for _ in range(500)]  # as of a loop that keeps its metrics
    other = fdp.data_parallel(lambda s, b: s + fdp.pmean(b))
    assert len(rank_local.notes) >= 500
    for mine in kept[::100]:
        refused(other, mine, torch.ones(1000))
    del mine
    kept.clear()
    gc.collect()
    other(torch.zeros(1000), torch.ones(1000))
    for _ in range(1000):
        step(state, torch.ones(1000))
    assert len(rank_local.notes) <= 129
