"""How a call finds its program: earlier signatures are recognised, kept while they are in use, and hold nothing."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from samples import exhaustive
from telling_steps import Options, a_state, apart, plain_telling

import fdp
from fdp.distributed.group import resolve_group
from fdp.trace.calls import arguments, recognise

Tree = Any


def recognised(step: Any, *args: Any) -> bool:
    roles = step._roles_for(len(args))
    place = step._known.place(args, roles, resolve_group(None))
    return step._known.calls.recognise(place, *arguments.split_static(args, roles)) is not None


@pytest.mark.parametrize("donate", [pytest.param((), marks=exhaustive), 0], ids=["kept", "donated"])
def test_a_training_loop_is_recognised(donate: Any) -> None:
    """State that comes back, state from elsewhere, tied leaves, and signatures that take turns."""
    step = fdp.data_parallel(plain_telling, donate_argnums=donate, static_argnums=1, check_trace=False)
    tied = a_state()
    tied["l"][0] = tied["w"]
    with_empty = {**a_state(), "e": torch.ones(0), "e2": torch.ones(0)}
    for state in (a_state(), tied, with_empty):
        for width in (2, 3):
            step(state, Options(1.0), {"x": torch.ones(width)})
        for turn in range(6):
            args = (state, Options(1.0), {"x": torch.ones(2 + turn % 2)})
            assert recognised(step, *args)
            state = step(*args)[0]
        fresh = apart(state)
        # Donated leaves that no longer share memory are another signature.
        is_tied = state["l"][0] is state["w"]
        assert recognised(step, fresh, Options(1.0), {"x": torch.ones(2)}) != (is_tied and donate == 0)


@pytest.mark.filterwarnings("ignore:fdp. step .* was traced for the")
def test_one_more_signature_than_are_remembered_takes_the_long_way_and_is_right() -> None:
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), check_trace=False)
    widths = range(1, recognise.MOST + 2)
    for _ in range(2):
        for width in widths:
            assert step(torch.zeros(1), torch.ones(width)).item() == width
    assert step.traces == len(widths)
    assert len(step._known.calls._calls) == recognise.MOST
    before = {id(known.remembered) for known in step._known.values()}
    for width in widths:
        step(torch.zeros(1), torch.ones(width))
    assert {id(known.remembered) for known in step._known.values()} == before  # not made anew
    step(torch.zeros(1, requires_grad=True), torch.ones(1))  # the same signature, but not like the call before
    assert recognised(step, torch.zeros(1, requires_grad=True), torch.ones(1))


def test_a_step_keeps_no_tensor_alive_however_it_was_called() -> None:
    step = fdp.data_parallel(plain_telling, donate_argnums=0, static_argnums=1, check_trace=False)
    refs = []
    for width in (2, 3, 2):
        state, batch = a_state(), {"x": torch.ones(width)}
        refs += [weakref.ref(x) for x in optree.tree_leaves((state, batch)) if isinstance(x, torch.Tensor)]
        refs += [weakref.ref(x.untyped_storage()) for x in optree.tree_leaves(batch)]
        for _ in range(2):
            state = step(state, Options(1.0), batch)[0]
        del state, batch
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]


def test_a_batch_in_the_memory_of_returned_state_is_noticed() -> None:
    """The state lies where it lay, so nothing else would be looked at."""
    step = fdp.data_parallel(
        lambda s, b: {"a": s["a"] * 0, "b": s["b"] + fdp.pmean(b[0])}, donate_argnums=0, check_trace=False
    )
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    for _ in range(2):
        state = step(state, torch.ones(4))
    state["a"].fill_(5.0)
    assert not recognised(step, state, state["a"])
    assert not recognised(step, state, state["a"][:])
    assert step(state, state["a"])["b"].tolist() == [7.0] * 4


def adds(state: Tree, batch: Tree) -> Tree:
    mean = fdp.pmean(sum(leaf.sum() for leaf in optree.tree_leaves(batch)))
    return {key: leaf + mean for key, leaf in state.items()}


def warm(fn: Callable[..., Any], state: Tree, *rest: Any, **options: Any) -> tuple[Any, Tree]:
    """A step that was called twice, and the state that it returned."""
    step = fdp.data_parallel(fn, donate_argnums=0, check_trace=False, **options)
    for _ in range(2):
        state = step(state, *rest)
    assert recognised(step, state, *rest)
    return step, state


def test_small_changes_of_donated_state_and_batch_are_noticed() -> None:
    batch = {"x": torch.ones(2), "y": torch.ones(2)}
    step, state = warm(adds, {"a": torch.zeros(3), "e": torch.zeros(0)}, batch)
    assert not recognised(step, {**state, "e": state["a"][:0]}, batch)
    step, state = warm(adds, {"a": torch.zeros(3), "b": torch.zeros(3)}, batch)
    assert not recognised(step, {**state, "a": torch.zeros(5)[2:]}, batch)
    assert not recognised(step, state, {"x": batch["x"], "y": batch["x"].view(2)})
    assert recognised(step, state, {"x": batch["y"], "y": batch["x"]})


def test_memory_that_begins_elsewhere_and_lies_in_the_same_place() -> None:
    """The same bytes at another offset: a program that has offsets in it would read others."""

    def by_offset(state: Tree, batch: Tree) -> Tree:
        first = state["w"].as_strided((1,), (1,), state["w"].storage_offset())
        return {"w": state["w"] * 0 + first + fdp.pmean(batch)}

    def by_index(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"] * 0 + state["w"][0] + fdp.pmean(batch)}

    for fn in (by_offset, by_index):
        array = np.array([7.0, 7.0, 5.0, 5.0])
        step, state = warm(fn, {"w": torch.from_numpy(array[2:])}, torch.zeros(1))
        elsewhere = {"w": torch.from_numpy(array)[2:]}
        assert state["w"].data_ptr() == elsewhere["w"].data_ptr()
        assert recognised(step, elsewhere, torch.zeros(1)) == (fn is by_index)
    assert step(elsewhere, torch.zeros(1))["w"].tolist() == [5.0] * 2


@pytest.mark.parametrize("shows", [True, False], ids=["seen in repr", "seen in hash"])
def test_a_static_object_that_was_changed_inside_is_noticed(shows: bool) -> None:
    @dataclasses.dataclass(eq=not shows, unsafe_hash=not shows, repr=shows)
    class Config:
        scale: float

    config = Config(2.0)
    step, _ = warm(
        lambda w, c, b: w * 0 + fdp.pmean(b) * c.scale, torch.ones(1), config, torch.ones(1), static_argnums=1
    )
    config.scale = 3.0
    assert step(torch.ones(1), config, torch.ones(1)).item() == 3.0


def test_a_static_argument_that_cannot_be_hashed_is_refused_at_every_call() -> None:
    step, w = warm(lambda w, c, b: w + fdp.pmean(b), torch.ones(1), (1,), torch.ones(1), static_argnums=1)
    with pytest.raises(fdp.FdpError, match="static arguments that cannot be hashed"):
        step(w, [1], torch.ones(1))


def test_a_refused_leaf_is_refused_at_every_call() -> None:
    class Sub(torch.Tensor):
        pass

    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), donate_argnums=0, check_trace=False)
    for _ in range(2):
        step(torch.ones(2), torch.ones(2))
    with torch.inference_mode():
        under_inference = torch.ones(2)
    bad: list[Any] = [torch.ones(2).as_subclass(Sub), torch.ones(2, requires_grad=True) * 2, under_inference]
    for w in (*bad, torch.ones(2).to_sparse()):
        with pytest.raises(fdp.TraceError, match="leaves that it cannot take"):
            step(w, torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    for _ in range(2):
        step(leaf, torch.ones(2))
    with pytest.raises(fdp.TraceError, match="autograd may go back through it"):
        step(leaf * 2, torch.ones(2))


def test_old_signatures_are_forgotten_and_those_in_use_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdp.step.cache, "_MOST_SIGNATURES", 3)
    monkeypatch.setattr(recognise, "MOST", 1)
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), check_trace=False)

    def call(width: int) -> None:
        assert step(torch.zeros(1), torch.ones(width)).item() == width

    call(1)
    for width in (2, 3):
        call(width)
        call(1)
    oldest = weakref.ref(
        next(known.emitted for known in step._known.values() if "[2]" in str(known.emitted.plan.trace))
    )
    assert oldest() is not None
    call(4)
    call(1)
    assert step.traces == 4 and len(step._known) == 3
    gc.collect()
    assert oldest() is None
    call(1)
    call(3)
    assert step.traces == 4
    with pytest.warns(UserWarning, match="was traced again for arguments that it had been traced for"):
        call(2)
    assert step.traces == 5
