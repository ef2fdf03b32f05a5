"""`data_parallel` as a transform: of which functions, with which settings, and how a step may be called."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typed_steps
from bits import copied, same_bits, same_bits_or_equal
from fake_ranks import fake_group
from steps import shifted

import fdp

Tree = Any


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_is_a_new_step_of_the_same_function_and_settings(again: Callable[[Any], Any]) -> None:
    options = {"batch_argnums": 1, "donate_argnums": 0, "bucket_cap_mb": 3, "check_replication": False}
    step = fdp.data_parallel(shifted, static_argnums=(), check_trace=False, **options)
    step.plan(torch.ones(2), torch.ones(3))
    step(torch.ones(2), torch.ones(3))
    other = again(step)
    assert (step.traces, other.traces) == (2, 0) and not other._known
    assert other.__wrapped__ is shifted and other.__name__ == "shifted"
    for name in ("_argnums", "_group", "_settings"):
        assert getattr(other, name) == getattr(step, name), name
    state = torch.ones(2)
    assert other(state, torch.ones(3)) is state
    assert same_bits(state, torch.full((2,), 2.0)) and (step.traces, other.traces) == (2, 1)


def test_a_copy_runs_on_the_same_group_which_is_not_copied() -> None:
    step = fdp.data_parallel(shifted, group=fake_group(2))
    assert copy.copy(step)._group is step._group
    assert copy.deepcopy({"step": step})["step"]._group is step._group


def test_with_and_without_arguments_as_a_decorator_and_as_a_function() -> None:
    @fdp.data_parallel
    def bare(w: Tree, b: Tree) -> Tree:
        """Doc of bare."""
        return w + fdp.pmean(b)

    @fdp.data_parallel()
    def called(w: Tree, b: Tree) -> Tree:
        return w + fdp.pmean(b)

    @fdp.data_parallel(donate_argnums=0, bucket_cap_mb=[1, 2])
    def optioned(w: Tree, b: Tree) -> Tree:
        return w + fdp.pmean(b)

    for step in (bare, called, optioned, fdp.data_parallel(lambda w, b: w + fdp.pmean(b))):
        assert isinstance(step, fdp.Step)
        assert step(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]
    assert bare.__name__ == "bare" and bare.__doc__ == "Doc of bare."
    assert repr(bare) == "<fdp.Step bare, traced 1 time>"


def test_partial_functions_and_callable_objects() -> None:
    class Adder:
        def __init__(self, by: float):
            self.by = by

        def __call__(self, w: Tree, b: Tree) -> Tree:
            return w + self.by * fdp.pmean(b)

    def step(by: float, w: Tree, b: Tree) -> Tree:
        return w + by * fdp.pmean(b)

    for call in (Adder(2.0), functools.partial(step, 2.0)):
        transform = fdp.data_parallel(call)
        assert transform(torch.ones(2), torch.ones(2)).tolist() == [3.0, 3.0]
        assert repr(transform).startswith("<fdp.Step ")


def test_a_method_of_a_class() -> None:
    class Trainer:
        def __init__(self, scale: float):
            self.scale = scale

        @fdp.data_parallel(static_argnums=0)
        def step(self, w: Tree, b: Tree) -> Tree:
            return w + self.scale * fdp.pmean(b)

        @staticmethod
        @fdp.data_parallel
        def free(w: Tree, b: Tree) -> Tree:
            return w - fdp.pmean(b)

    one, two = Trainer(1.0), Trainer(5.0)
    w, b = torch.ones(2), torch.ones(2)
    assert [t.step(w, b)[0].item() for t in (one, two, one)] == [2.0, 6.0, 2.0]
    assert Trainer.step.traces == 2
    assert one.free(w, b).tolist() == Trainer.free(w, b).tolist() == [0.0, 0.0]
    bound = fdp.data_parallel(Trainer(3.0).step.__func__.__wrapped__.__get__(Trainer(3.0)))
    assert bound(w, b).tolist() == [4.0, 4.0]


def test_keyword_arguments_are_put_in_their_places() -> None:
    def step(state: Tree, batch: Tree, factor: Any = 3.0, flag: Any = True) -> Tree:
        return state + factor * fdp.pmean(batch) if flag else state

    w, b = torch.ones(2), torch.ones(2)
    transform = fdp.data_parallel(step, batch_argnums=1)
    for args, kwargs, expected in [
        ((w, b), {}, 4.0),
        ((w,), {"batch": b}, 4.0),
        ((), {"batch": b, "state": w}, 4.0),
        ((w, b), {"factor": 2.0}, 3.0),
        ((w, b), {"flag": False}, 1.0),
        ((w,), {"flag": True, "batch": b}, 4.0),
        ((w, b, 5.0), {}, 6.0),
    ]:
        assert transform(*args, **kwargs).tolist() == [expected] * 2, (args, kwargs)
        assert transform.plan(*args, **kwargs).trace.outputs[0].shape == (2,)


def test_a_default_that_is_left_out_is_no_argument() -> None:
    """The batch stays the last argument that was given, however it was given."""
    transform = fdp.data_parallel(lambda state, batch, flag=True: state + fdp.pmean(batch))
    assert transform(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]
    assert transform(torch.ones(2), batch=torch.ones(2)).tolist() == [2.0, 2.0]
    assert [i.role for i in transform.trace(torch.ones(2), batch=torch.ones(2)).inputs] == ["state", "batch"]


def test_several_batch_arguments_and_negative_numbers() -> None:
    def step(x: Tree, state: Tree, y: Tree, k: int) -> Tree:
        return state + k * fdp.pmean(x * y)

    args = (torch.full((2,), 2.0), torch.ones(2), torch.full((2,), 3.0), 10)
    for batch, static, donate in [((0, 2), 3, 1), ((-4, -2), -1, -3), ([0, -2], [3], [1])]:
        transform = fdp.data_parallel(step, batch_argnums=batch, static_argnums=static, donate_argnums=donate)
        given = (*copied(args[:3]), args[3])
        assert [(i.role, i.donated) for i in transform.trace(*given).inputs] == [
            ("batch", False), ("state", True), ("batch", False)
        ]  # fmt: skip
        out = transform(*given)
        assert out.tolist() == [61.0, 61.0] and out is given[1]


def test_the_batch_is_the_last_argument_that_is_not_static() -> None:
    transform = fdp.data_parallel(lambda w, b, k: w + k * fdp.pmean(b), static_argnums=2)
    assert [i.role for i in transform.trace(torch.ones(1), torch.ones(1), 2).inputs] == ["state", "batch"]


def test_no_arguments_and_no_batch() -> None:
    assert fdp.data_parallel(lambda: torch.ones(2))().tolist() == [1.0, 1.0]
    transform = fdp.data_parallel(lambda w, v: w + v, batch_argnums=())
    assert transform(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_stages_by_hand_give_what_the_step_gives() -> None:
    transform = fdp.data_parallel(shifted, static_argnums=())
    state, batch = {"w": torch.arange(3.0), "n": 4}, torch.arange(5.0)
    emitted = transform.trace(state, batch).plan(0.5).emit()
    assert same_bits_or_equal(emitted(state, batch), shifted(state, batch))
    assert transform.plan(state, batch).bucket_cap_mb == (1.0, 25.0)
    assert transform.traces == 2
    assert emitted.source.startswith("def step(")
    with pytest.raises(fdp.ArgumentError, match="other arguments"):
        emitted({"w": torch.ones(4), "n": 4}, batch)
    with pytest.raises(fdp.ArgumentError, match="another structure"):
        emitted({"w": torch.ones(3)}, batch)
    with pytest.raises(fdp.ArgumentError, match="other arguments"):
        emitted({"w": torch.arange(3.0), "n": 5}, batch)


def test_a_group_of_one_is_the_default() -> None:
    step = fdp.data_parallel(lambda b: (fdp.psum(b), fdp.per_rank(fdp.axis_index()), torch.tensor(fdp.axis_size())))
    assert [x.tolist() for x in step(torch.ones(1))] == [[1.0], 0, 1]
    assert step.trace(torch.ones(1)).world_size == 1


def test_type_checkers_know_what_a_step_takes_and_returns() -> None:
    # What they know is checked by `make lint`; this runs the program that it reads.
    new, loss, taken, added, updated = typed_steps.results()
    w, x = torch.tensor([1.0, 2.0]), torch.ones(4, 2)
    assert torch.equal(loss, torch.tensor(9.0)) and torch.equal(new, w - 0.1 * torch.tensor([6.0, 6.0]))
    assert torch.equal(taken, w - x.mean(0)) and torch.equal(added, w + x.mean(0))
    assert torch.equal(updated, w - 0.5 * torch.tensor([6.0, 6.0]))
