"""Donated arguments: new values take the memory of old ones, and nothing else changes with them."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from bits import copied, same_bits
from fake_ranks import fake_group
from samples import some
from steps import shifted

import fdp

Tree = Any


def test_a_donated_state_comes_back_as_the_same_tensors() -> None:
    transform = fdp.data_parallel(shifted, donate_argnums=0)
    state = {"w": torch.ones(3), "b": [torch.zeros(2), torch.zeros(())], "n": 3}
    tensors = [x for x in optree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    for k in range(1, 4):
        state = transform(state, torch.ones(2))
        after = [x for x in optree.tree_leaves(state) if isinstance(x, torch.Tensor)]
        assert all(x is y for x, y in zip(after, tensors, strict=True))
        assert [x.flatten()[0].item() for x in tensors] == [k, k, k + 1]


def test_without_donation_new_tensors_come_back_and_the_old_ones_stay() -> None:
    transform = fdp.data_parallel(shifted)
    state = {"w": torch.ones(3)}
    out = transform(state, torch.ones(2))
    assert out["w"] is not state["w"]
    assert state["w"].tolist() == [1.0] * 3 and out["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("world", [1, 2])
def test_swapped_leaves_of_a_donated_state(world: int) -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        mean = fdp.pmean(batch)
        return {"a": state["b"], "b": state["a"], "c": state["c"] + mean, "d": state["c"]}

    transform = fdp.data_parallel(step, donate_argnums=0, group=None if world == 1 else fake_group(world))
    state = {k: torch.full((2,), float(i)) for i, k in enumerate("abcd")}
    for _ in range(3):
        expected = step(copied(state), torch.ones(2)) if world == 1 else None
        if world == 1:
            state = transform(state, torch.ones(2))
            assert same_bits(state, expected)
        else:
            from fdp.runtime import Emitted

            emitted = Emitted(transform.plan(state, torch.ones(2)), fake_group(world))
            before = copied(state)
            state = emitted.dry_run([*optree.tree_leaves(state), torch.ones(2)])
            assert same_bits(state["a"], before["b"]) and same_bits(state["b"], before["a"])
            assert same_bits(state["d"], before["c"]) and same_bits(state["c"], before["c"] + 1)


def test_a_donated_leaf_is_written_where_its_new_value_lies_as_it_does() -> None:
    """An operator closes gaps: in plain PyTorch, and so here."""
    transform = fdp.data_parallel(shifted, donate_argnums=0)
    state = [torch.arange(6.0).view(2, 3).t(), torch.ones(4, 4)[:, :3], torch.arange(8.0)[::2]]
    before = copied(state)
    out = transform(state, torch.ones(2))
    assert [x is y for x, y in zip(out, state, strict=True)] == [True, False, False]
    expected = shifted(before, torch.ones(2))
    assert [x.stride() for x in out] == [x.stride() for x in expected]
    assert same_bits(out, expected)
    again = transform(out, torch.ones(2))
    assert all(x is y for x, y in zip(again, out, strict=True))


def test_leaves_that_cannot_be_donated_get_new_tensors() -> None:
    """Of another shape or dtype than before, or gone; the rest is still donated."""

    def step(state: Tree, batch: Tree) -> Tree:
        mean = fdp.pmean(batch).sum()
        return {"grown": torch.cat([state["grown"], state["grown"]]), "cast": state["cast"].double() + mean,
                "same": state["same"] + mean}  # fmt: skip

    transform = fdp.data_parallel(step, donate_argnums=0)
    state = {"grown": torch.ones(2), "cast": torch.ones(2), "same": torch.ones(2), "gone": torch.ones(2)}
    out = transform(state, torch.ones(1))
    assert out["same"] is state["same"] and out["grown"].shape == (4,) and out["cast"].dtype == torch.float64
    assert state["grown"].tolist() == state["gone"].tolist() == [1.0, 1.0]


def test_what_is_returned_beside_a_donated_state_does_not_change_later() -> None:
    """Copies of the state, views of it, and the state as it was."""

    def step(state: Tree, batch: Tree) -> Tree:
        new = {"w": state["w"] + fdp.pmean(batch)}
        return new, {"new": new["w"], "view": new["w"][1:], "old": state["w"], "mean": fdp.pmean(batch)}

    transform = fdp.data_parallel(step, donate_argnums=0)
    state = {"w": torch.zeros(3)}
    kept = []
    for k in range(3):
        state, extras = transform(state, torch.ones(3))
        kept.append(extras)
        for i, seen in enumerate(kept):
            assert [seen[n][0].item() for n in ("new", "view", "old", "mean")] == [i + 1, i + 1, i, 1.0], k


@pytest.mark.parametrize("compiled", some([False, True]))
def test_what_is_returned_beside_a_state_that_will_be_donated_does_not_change_later(compiled: bool) -> None:
    """The first state lies in one tensor, or lacks an entry: what is returned is new memory, and is donated next."""

    def step(state: Tree, batch: Tree) -> Tree:
        new = {"w": state["w"] + fdp.pmean(batch).sum(), "b": state["b"] + 1}
        new["late"] = state.get("late", state["b"] * 0) + new["b"]
        return new, {"row": new["w"][0], "new": new["w"], "late": new["late"].view(1, 2)}

    transform = fdp.data_parallel(step, donate_argnums=0, compile=compiled)
    flat = torch.zeros(6)
    state, kept = {"w": flat[:4].view(2, 2), "b": flat[4:]}, []
    for _ in range(3):
        state, extras = transform(state, torch.ones(1))
        kept.append((extras, copied(extras)))
    assert all(same_bits(extras, then) for extras, then in kept)
    assert flat.tolist() == [0.0] * 6
