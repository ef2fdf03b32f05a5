"""`data_parallel` as a transform: what makes it trace again, how it may be called, donation, errors in the middle."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from graphs import copied, fake_group, same_bits
from torch import nn

import fdp

Tree = Any


def shifted(state: Tree, batch: Tree) -> Tree:
    """The smallest step: adds the mean of the batch to every leaf of the state."""
    mean = fdp.pmean(batch.mean())
    return optree.tree_map(lambda leaf: leaf + mean if isinstance(leaf, torch.Tensor) else leaf, state)


class Counted:
    """A step that counts how often Python runs through it while it is traced."""

    def __init__(self, fn: Callable[..., Any] = shifted, **options: Any):
        self.runs = 0

        @functools.wraps(fn)
        def counted(*args: Any) -> Any:
            self.runs += 1
            return fn(*args)

        self.step = fdp.data_parallel(counted, check_trace=False, **options)

    def __call__(self, *args: Any) -> Any:
        return self.step(*args)


# --- the signature -----------------------------------------------------------------------------------

BASE = {"w": torch.ones(3, 2), "n": 2}
CHANGES: dict[str, Tree] = {
    "another shape": {"w": torch.ones(2, 3), "n": 2},
    "another dtype": {"w": torch.ones(3, 2, dtype=torch.float64), "n": 2},
    "other strides": {"w": torch.ones(2, 3).t(), "n": 2},
    "another structure": {"w": torch.ones(3, 2), "n": 2, "more": torch.ones(1)},
    "another container": [torch.ones(3, 2), 2],
    "another key": {"v": torch.ones(3, 2), "n": 2},
    "another number": {"w": torch.ones(3, 2), "n": 3},
    "another type of number": {"w": torch.ones(3, 2), "n": 2.0},
    "a boolean for a number": {"w": torch.ones(3, 2), "n": True},
    "None for a leaf": {"w": torch.ones(3, 2), "n": None},
    "a string": {"w": torch.ones(3, 2), "n": "2"},
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_of_signature_is_traced_anew(name: str) -> None:
    step = Counted()
    batch = torch.ones(4)
    for count, state in enumerate((BASE, CHANGES[name]), 1):
        assert same_bits_or_equal(step(state, batch), shifted(state, batch))
        assert (step.runs, step.step.traces) == (count, count)
    # Both are known now.
    for state in (BASE, CHANGES[name], BASE):
        assert same_bits_or_equal(step(state, batch), shifted(state, batch))
    assert step.runs == 2


def same_bits_or_equal(one: Tree, two: Tree) -> bool:
    if optree.tree_structure(one) != optree.tree_structure(two):
        return False

    def equal(x: Any, y: Any) -> bool:
        return same_bits(x, y) if isinstance(x, torch.Tensor) else (type(x), repr(x)) == (type(y), repr(y))

    return all(map(equal, optree.tree_leaves(one), optree.tree_leaves(two)))


def test_other_values_are_not_traced_anew() -> None:
    step = Counted()
    for k in range(4):
        state = {"w": torch.full((3, 2), float(k)), "n": 2}
        batch = torch.full((4,), 0.5 * k)
        assert same_bits(step(state, batch)["w"], shifted(state, batch)["w"])
    assert step.runs == 1


def test_another_shape_of_the_batch_is_traced_anew() -> None:
    step = Counted()
    for size, runs in ((4, 1), (2, 2), (4, 2), (1, 3), (0, 4), (2, 4)):
        step({"w": torch.ones(1)}, torch.ones(size))
        assert step.runs == runs


@pytest.mark.parametrize(
    ("one", "two"),
    [(0.0, -0.0), (1, 1.0), (1, True), (0, False), (1.0, 1 + 0j), (float("inf"), -float("inf"))],
    ids=str,
)
def test_numbers_that_are_equal_and_not_the_same(one: Any, two: Any) -> None:
    """Python calls them equal; what a step computes from them is not."""

    def step(number: Any, batch: torch.Tensor) -> Any:
        return torch.full((2,), number), torch.ones(2, dtype=torch.int64) * number, fdp.pmean(batch)

    for options in ({}, {"static_argnums": 0}):
        counted = Counted(step, **options)
        for number in (one, two, one):
            found, expected = counted(number, torch.ones(1)), step(number, torch.ones(1))
            assert same_bits(torch.view_as_real(found[0] + 0j), torch.view_as_real(expected[0] + 0j))
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            assert [str(x) for x in found] == [str(x) for x in expected]
        assert counted.runs == 2


def test_a_nan_is_the_same_at_every_call() -> None:
    step = Counted()
    for _ in range(3):
        step({"w": torch.ones(2), "n": float("nan")}, torch.ones(2))
    assert step.runs == 1


class Mode(enum.Enum):
    ADD = 1
    SUBTRACT = 2


def test_static_arguments_are_constants_that_are_compared() -> None:
    def step(state: Tree, mode: Any, scale: Any, batch: Tree) -> Tree:
        sign = 1 if mode is Mode.ADD else -1
        return state + sign * scale[0] * fdp.pmean(batch)

    counted = Counted(step, static_argnums=(1, 2))
    w, b = torch.ones(2), torch.ones(2)
    for mode, scale, expected, runs in [
        (Mode.ADD, (2,), 3.0, 1), (Mode.ADD, (2,), 3.0, 1), (Mode.SUBTRACT, (2,), -1.0, 2),
        (Mode.SUBTRACT, (0.5,), 0.5, 3), (Mode.ADD, (2,), 3.0, 3),
    ]:  # fmt: skip
        assert counted(w, mode, scale, b).tolist() == [expected] * 2
        assert counted.runs == runs


def test_a_static_object_without_equality_of_its_own_is_known_by_identity() -> None:
    class Config:
        scale = 2.0

    def step(state: Tree, config: Any, batch: Tree) -> Tree:
        return state * config.scale + fdp.pmean(batch)

    counted = Counted(step, static_argnums=1)
    one, two = Config(), Config()
    two.scale = 3.0
    got = [counted(torch.ones(1), config, torch.zeros(1)).item() for config in (one, two, one)]
    assert got == [2.0, 3.0, 2.0] and counted.runs == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.resize_(2),
        lambda w: w.unsqueeze_(0),
        lambda w: setattr(w, "data", w.data[:2]),
        lambda w: setattr(w, "data", torch.ones(5)),
        lambda w: w.as_strided_((2,), (2,)),
    ],
    ids=["resize_", "unsqueeze_", "data is a part", "other data", "as_strided_"],
)
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_a_leaf_that_was_changed_in_shape_is_traced_anew(change: Callable[[Tree], Any], donate: Any) -> None:
    """The same tensor object goes in at every call; what it is may have changed all the same."""

    def step(state: Tree, batch: Tree) -> Tree:
        w = state["w"]
        return {"w": w * 1}, w.sum() / w.numel(), torch.zeros(w.shape), fdp.pmean(batch)

    counted = Counted(step, donate_argnums=donate)
    state = {"w": torch.arange(4.0)}
    for _ in range(2):
        new, *_ = counted(state, torch.ones(1))
        state = new if donate == 0 else state
    change(state["w"])
    expected = step(copied(state), torch.ones(1))
    assert same_bits(counted(state, torch.ones(1)), expected)
    assert counted.runs == 2


def test_a_square_leaf_that_was_transposed_in_place_is_traced_anew() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"] * 1}, state["w"].reshape(-1)[1], fdp.pmean(batch)

    counted = Counted(step, donate_argnums=0)
    state = {"w": torch.arange(9.0).view(3, 3).clone()}
    for _ in range(2):
        state, *_ = counted(state, torch.ones(1))
    state["w"].t_()
    assert counted(state, torch.ones(1))[1].item() == 3.0


def test_leaves_that_come_to_share_memory_are_traced_anew_when_donated() -> None:
    """Written in place one after the other, they would spoil each other."""

    def step(state: Tree, batch: Tree) -> Tree:
        return {"a": state["a"] * 2, "b": state["b"] + fdp.pmean(batch)}

    counted = Counted(step, donate_argnums=0)
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    for _ in range(2):
        state = counted(state, torch.ones(2))
    for shared in ({"a": state["a"], "b": state["a"]}, {"a": state["a"], "b": state["a"].view(2)}):
        expected = step(copied(shared), torch.ones(2))
        assert same_bits(counted(shared, torch.ones(2)), expected)


def test_state_and_batch_may_share_memory_when_the_state_is_donated() -> None:
    counted = Counted(lambda state, batch: {"a": state["a"] * 2, "m": fdp.pmean(batch)}, donate_argnums=0)
    state = counted({"a": torch.ones(2), "m": torch.zeros(2)}, torch.ones(2))
    for _ in range(2):
        expected = {"a": state["a"] * 2, "m": state["a"].clone()}
        state = counted(state, state["a"])
        assert same_bits(state, expected)


def test_a_step_holds_no_tensor_of_its_arguments() -> None:
    import gc
    import weakref

    step = fdp.data_parallel(shifted, donate_argnums=0)
    state, batch = {"w": torch.ones(3)}, torch.ones(2)
    held = [weakref.ref(state["w"]), weakref.ref(batch)]
    out = step(state, batch)
    out = step(out, batch)
    del state, batch, out
    gc.collect()
    assert [ref() for ref in held] == [None, None]


# --- side effects and the warning --------------------------------------------------------------------


def test_python_side_effects_happen_in_the_first_two_calls_of_a_signature() -> None:
    seen: list[int] = []

    def step(state: Tree, batch: Tree) -> Tree:
        seen.append(len(batch))
        return shifted(state, batch)

    for check in (False, True):
        seen.clear()
        transform = fdp.data_parallel(step, check_trace=check)
        transform(torch.ones(2), torch.ones(3))
        assert len(seen) == 1 + check  # traced; and run beside its trace
        transform(torch.ones(2), torch.ones(3))
        assert len(seen) == 1 + 2 * check  # on perturbed inputs
        before = len(seen)
        for _ in range(3):
            transform(torch.ones(2), torch.ones(3))
        assert len(seen) == before
        transform(torch.ones(2), torch.ones(5))
        assert len(seen) > before and seen[-1] == 5


def test_a_step_that_keeps_retracing_gets_one_warning() -> None:
    step = fdp.data_parallel(shifted, check_trace=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(1, 21):
            step({"w": torch.ones(2)}, torch.ones(size))
    texts = [str(w.message) for w in caught if "traced" in str(w.message)]
    assert len(texts) == 1
    assert texts[0] == (
        "fdp: step 'shifted' was traced for the 8th time. What changed last: batch: shape [7] became [8]. Each "
        "trace takes as long as several steps: pad to few sizes; each is traced once, and the 64 that were called "
        "last are kept."
    )
    (warning,) = [w for w in caught if "traced" in str(w.message)]
    assert warning.filename == __file__


def retrace_warning(arguments: Callable[[int], tuple[Any, ...]], **options: Any) -> str:
    def step(state: Tree, batch: Tree, *rest: Any) -> Tree:
        return fdp.pmean(batch)

    transform = fdp.data_parallel(step, check_trace=False, batch_argnums=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(9):
            transform(*arguments(k))
            transform(*arguments(k))
    (text,) = [str(w.message) for w in caught]
    return text.split("What changed last: ")[1].split(". Each trace")[0]


def test_the_warning_names_what_changed_with_its_old_and_new_value() -> None:
    x = torch.ones(1)
    assert retrace_warning(lambda k: ({"lr": 0.5**k, "w": x}, x)) == "state['lr']: 0.015625 became 0.0078125"
    assert retrace_warning(lambda k: (x, x, k), static_argnums=2) == "the static arguments: (6,) became (7,)"
    assert "the structure of the arguments: " in retrace_warning(lambda k: ([x] * k, x))


# --- ways to call ------------------------------------------------------------------------------------


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


# --- what goes in and comes out ----------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


def test_trees_of_all_kinds_of_containers() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        mean = fdp.pmean(batch)
        return optree.tree_map(lambda leaf: leaf + mean, state)

    state = {
        "named": Point(torch.ones(1), [torch.zeros(2), None]),
        "ordered": collections.OrderedDict([("z", torch.ones(1)), ("a", torch.ones(2))]),
        "default": collections.defaultdict(list, {"k": torch.ones(1)}),
        "deque": collections.deque([torch.ones(1), torch.ones(1)]),
        "empty": ({}, [], ()),
        3: torch.ones(1),
        ("a", 1): torch.ones(1),
    }
    transform = fdp.data_parallel(step)
    for _ in range(2):
        expected = step(state, torch.ones(1))
        found = transform(state, torch.ones(1))
        assert same_bits(found, expected)
        assert isinstance(found["named"], Point) and isinstance(found["ordered"], collections.OrderedDict)
        assert list(found["ordered"]) == ["z", "a"] and isinstance(found["default"], collections.defaultdict)
        assert list(found) == list(expected)
        state = found


def test_constants_in_outputs_come_back_at_every_call() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        return {"w": fdp.pmean(batch), "mode": Mode.ADD, "n": 3, "none": None, "text": "done", "flag": True, "x": 0.5}

    transform = fdp.data_parallel(step)
    for _ in range(2):
        out = transform(torch.ones(1), torch.ones(1))
        assert {**out, "w": None} == {"w": None, "mode": Mode.ADD, "n": 3, "none": None, "text": "done", "flag": True,
                                      "x": 0.5}  # fmt: skip


@pytest.mark.parametrize("value", [None, {}, (), [], 7, "text"], ids=str)
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_a_step_that_returns_nothing_of_tensors(value: Any, donate: Any) -> None:
    transform = fdp.data_parallel(lambda state, batch: value, donate_argnums=donate)
    for _ in range(2):
        assert transform({"w": torch.ones(2)}, torch.ones(2)) == value


def test_declared_outputs_may_vary() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        return fdp.per_rank({"loss": batch.sum(), "rank": fdp.axis_index(), "size": len(batch)}), fdp.pmean(batch)

    transform = fdp.data_parallel(step)
    own, _ = transform(torch.ones(1), torch.arange(3.0))
    assert (own["loss"].item(), own["rank"].item(), own["size"].item()) == (3.0, 0, 3)
    assert [o.per_rank for o in transform.trace(torch.ones(1), torch.ones(3)).outputs] == [True] * 3 + [False]


def test_replication_is_not_checked_if_told_so() -> None:
    step = lambda w, b: (w + b, torch.rand(2))  # noqa: E731
    with pytest.raises(fdp.ReplicationError):
        fdp.data_parallel(step)(torch.ones(2), torch.ones(2))
    transform = fdp.data_parallel(step, check_replication=False)
    torch.manual_seed(3)
    out, noise = transform(torch.ones(2), torch.ones(2))
    torch.manual_seed(3)
    assert out.tolist() == [2.0, 2.0] and same_bits(noise, torch.rand(2))
    assert [o.varying for o in transform.trace(torch.ones(2), torch.ones(2)).outputs] == [True, True]


def test_random_numbers_are_those_of_the_function() -> None:
    """From the first call on, though a new trace is also checked: that draws from a fork of the generator."""

    def step(w: Tree, b: Tree) -> Tree:
        return fdp.pmean(F.dropout(b, 0.5)) + fdp.pmean(torch.randn(3)) * w, fdp.pmean(torch.rand_like(b))

    transform = fdp.data_parallel(step)
    torch.manual_seed(5)
    expected = [step(torch.ones(3), torch.ones(3)) for _ in range(3)]
    torch.manual_seed(5)
    assert same_bits([transform(torch.ones(3), torch.ones(3)) for _ in range(3)], expected)


def test_a_generator_of_the_users_own() -> None:
    """It goes on from call to call as without fdp, and the check of the first call does not move it."""
    generator = torch.Generator()

    def step(w: Tree, b: Tree) -> Tree:
        return w * fdp.pmean(torch.rand(2, generator=generator)) + fdp.pmean(b)

    transform = fdp.data_parallel(step)
    generator.manual_seed(3)
    expected = [step(torch.ones(2), torch.ones(2)) for _ in range(3)]
    generator.manual_seed(3)
    assert same_bits([transform(torch.ones(2), torch.ones(2)) for _ in range(3)], expected)


def test_results_can_be_used_by_autograd_and_in_place() -> None:
    transform = fdp.data_parallel(shifted)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out = transform(torch.ones(2), torch.ones(2))
        out.add_(1)
        out.requires_grad_()
        (grad,) = torch.autograd.grad((out**2).sum(), out)
        assert grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_right_under_any_gradient_mode(mode: Callable[[], Any]) -> None:
    def step(w: Tree, b: Tree) -> Tree:
        return fdp.grad(lambda p: (p**2 * b).sum())(w)

    outside = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with mode():
        inside = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        transform = fdp.data_parallel(step)
        # A call of its own cannot save the latter for its backward pass: autograd says so itself.
        assert step(*outside).tolist() == transform(*outside).tolist() == transform(*inside).tolist() == [6.0, 16.0]
    assert transform(*inside).tolist() == [6.0, 16.0]
    assert transform.traces == 1


def test_leaves_that_require_gradients() -> None:
    apply, params, _ = fdp.from_module(nn.Linear(2, 1))
    assert all(p.requires_grad for p in params.values())

    def step(state: Tree, batch: Tree) -> Tree:
        grads = fdp.grad(lambda p: apply(p, {}, batch)[0].square().mean())(state)
        return {k: state[k] - 0.1 * grads[k] for k in state}, fdp.pmean(batch.mean())

    for donate in ((), 0):
        transform = fdp.data_parallel(step, donate_argnums=donate)
        state = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        plain = {k: v.detach().clone() for k, v in params.items()}
        for k in range(3):
            batch = torch.full((4, 2), 0.5 * k)
            state, _ = transform(state, batch)
            plain = step(plain, batch)[0]
            assert same_bits(state, plain)


# --- choices and numbers by the values of tensors ----------------------------------------------------


def test_a_condition_is_decided_anew_at_every_call() -> None:
    def step(w: Tree, b: Tree) -> Tree:
        mean = fdp.pmean(b)
        chosen = torch.cond(mean.sum() > 0, lambda x: x + 1, lambda x: x - 1, (w,))
        closed = torch.cond(mean.sum() > 0, lambda: w * mean, lambda: w - mean, ())
        grad = fdp.grad(lambda p: torch.cond(b.sum() > 0, lambda x: (x * x).sum(), lambda x: (3 * x).sum(), (p,)))(w)
        return chosen, closed, grad

    transform = fdp.data_parallel(step)
    w = torch.full((2,), 2.0)
    for sign in (1.0, -1.0, 1.0):
        chosen, closed, grad = transform(w, torch.full((2,), 5.0 * sign))
        assert chosen.tolist() == [2.0 + sign] * 2
        assert closed.tolist() == [10.0 if sign > 0 else 7.0] * 2
        assert grad.tolist() == [4.0 if sign > 0 else 3.0] * 2
    assert transform.traces == 1


def test_a_loop_runs_as_often_as_values_say() -> None:
    from torch._higher_order_ops import while_loop

    def step(w: Tree, b: Tree) -> Tree:
        most = fdp.pmean(b).sum()
        return while_loop(lambda i, x: i < most, lambda i, x: (i + 1, x * 2), (torch.zeros(()), w))[1]

    transform = fdp.data_parallel(step)
    assert [transform(torch.ones(1), torch.full((1,), k)).item() for k in (1.0, 3.0, 0.0)] == [2.0, 8.0, 1.0]


NUMBERS = {
    "a factor": lambda w, n: w * n,
    "arithmetic": lambda w, n: w * (1 - 2 * n) / (n**2 + 3),
    "in place": lambda w, n: w.clone().mul_(n).add_(1, alpha=n),
    "a bound": lambda w, n: torch.clamp(w, max=n),
    "a value to fill with": lambda w, n: torch.full_like(w, n),
}


@pytest.mark.parametrize("name", list(NUMBERS))
def test_numbers_read_from_tensors_are_read_at_every_call(name: str) -> None:
    def step(w: Tree, b: Tree) -> Tree:
        return NUMBERS[name](w, fdp.pmean(b).sum().item())

    transform = fdp.data_parallel(step)
    w = torch.tensor([1.0, 5.0])
    for k in (1.0, 2.0, -3.0):
        torch.testing.assert_close(transform(w, torch.full((2,), k)), step(w, torch.full((2,), k)))
    assert transform.traces == 1


# --- autocast, defaults, compiled functions ----------------------------------------------------------


def autocast_step(w: Tree, b: Tree) -> Tree:
    y = b @ w
    with torch.autocast("cpu", enabled=False):
        z = b @ w
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = b @ w
    return fdp.pmean((y, z, x))


def test_autocast_around_the_call_converts_a_parameter_once() -> None:
    """Its gradients by several uses are added up in the narrow dtype, as in plain PyTorch."""
    w, b = torch.randn(6, 6), torch.randn(12, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fdp.data_parallel(lambda w, b: fdp.grad(lambda w: (b @ w @ w).float().square().mean())(w))(w, b)
        leaf = w.clone().requires_grad_()
        value = (b @ leaf @ leaf).float().square().mean()
    assert same_bits(found, torch.autograd.grad(value, leaf)[0])


def test_autocast_around_the_call_and_inside_the_step() -> None:
    w, b = torch.randn(3, 3), torch.randn(3, 3)
    transform = fdp.data_parallel(autocast_step)
    for _ in range(2):
        assert same_bits(transform(w, b), autocast_step(w, b))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = transform(w, b), autocast_step(w, b)
        assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert same_bits(found, expected)
    assert transform.traces == 2
    with torch.autocast("cpu", dtype=torch.float16):
        assert same_bits(transform(w, b), autocast_step(w, b))
    assert transform.traces == 3


def test_gradients_under_autocast() -> None:
    def step(w: Tree, b: Tree) -> Tree:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fdp.grad(lambda p: (b @ p).float().square().mean())(w)

    w, b = torch.randn(3, 3), torch.randn(3, 3)
    assert same_bits(fdp.data_parallel(step)(w, b), step(w, b))


def test_the_default_dtype_is_part_of_the_signature() -> None:
    transform = fdp.data_parallel(lambda w, b: torch.zeros(2) + fdp.pmean(b).sum())
    assert transform(torch.ones(1), torch.ones(1)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert transform(torch.ones(1), torch.ones(1)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_that_dynamo_is_to_leave_alone_is_a_step() -> None:
    """It is not compiled by anything; what fdp.value_and_grad and others return is such a function."""
    w, x = torch.ones(2), torch.ones(3, 2)
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    for step in (fdp.grad(loss), torch.compiler.disable(fdp.grad(loss))):
        assert torch.equal(fdp.data_parallel(step)(w, x), torch.full((2,), 3.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_function_under_torch_compile_is_traced_through() -> None:
    """It runs uncompiled inside of the step, with the step's own lines; or is refused. It is never wrong."""
    scaled = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    for p in module.parameters():
        p.requires_grad_(False)

    def step(w: Tree, b: Tree) -> Tree:
        grads = fdp.grad(lambda p: scaled(p * b).sum())(w)
        return grads, fdp.pmean(module(b))

    plain = torch.sin
    w, b = torch.randn(2), torch.randn(2)
    transform = fdp.data_parallel(step)
    for _ in range(2):
        grads, out = transform(w, b)
        torch.testing.assert_close(grads, torch.func.grad(lambda p: (plain(p * b) * 2).sum())(w))
        torch.testing.assert_close(out, module._orig_mod(b))


# --- donation ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("compiled", [False, True])
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


# --- errors in the middle ----------------------------------------------------------------------------


def test_a_step_called_inside_a_step_is_part_of_it() -> None:
    @fdp.data_parallel
    def inner(w: Tree, b: Tree) -> Tree:
        return fdp.grad(lambda p: (p * b).square().sum())(w)

    @fdp.data_parallel
    def outer(w: Tree, b: Tree) -> Tree:
        return w - 0.1 * inner(w, b), inner(w, b=b)

    w, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0])
    for first in (True, False):
        if not first:
            inner(w, b)
        new, grads = outer(w, b)
        assert grads.tolist() == [2.0, 4.0] and new.tolist() == pytest.approx([0.8, 1.6])
    assert len(outer.trace(w, b).gradients) == 2
    assert inner(w, b).tolist() == [2.0, 4.0]


def test_a_step_that_calls_itself() -> None:
    @fdp.data_parallel
    def countdown(w: Tree, n: int, b: Tree) -> Tree:
        return w if n == 0 else countdown(w + fdp.pmean(b), n - 1, b)

    assert countdown(torch.zeros(1), 3, torch.ones(1)).item() == 3.0


def test_a_call_while_the_step_is_running_is_refused() -> None:
    """From another thread; buckets hold one call at a time."""
    inside, go_on = threading.Event(), threading.Event()

    @torch.library.custom_op("fdp_test::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(20)
        return x.clone()

    @slow.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    transform = fdp.data_parallel(lambda w, b: w + slow(fdp.pmean(b)), check_trace=False)
    transform_of_its_own = fdp.data_parallel(lambda w, b: w - fdp.pmean(b))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(transform(torch.ones(2), torch.ones(2))))
    go_on.set()
    transform(torch.ones(2), torch.ones(2))
    go_on.clear()
    inside.clear()
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(fdp.FdpError, match="was called while it was running, from another thread or from itself"):
            transform(torch.ones(2), torch.ones(2))
        assert transform_of_its_own(torch.ones(2), torch.ones(2)).tolist() == [0.0, 0.0]
    finally:
        go_on.set()
        thread.join()
    assert found[0].tolist() == [2.0, 2.0]
    assert transform(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_two_threads_may_trace_two_steps() -> None:
    """What belongs to a step that is being traced belongs to its thread."""
    results: dict[int, Any] = {}

    def work(k: int) -> None:
        try:
            transform = fdp.data_parallel(lambda w, b: w + k * fdp.pmean(b))
            results[k] = [transform(torch.ones(n), torch.ones(n)).tolist() for n in (1, 2)]
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [[1.0 + k], [1.0 + k] * 2] for k in range(3)}


def test_an_error_in_the_middle_leaves_the_state_and_the_step_usable() -> None:
    """The all-gather is the one collective that needs a buffer in a world of one."""

    def step(state: Tree, batch: Tree) -> Tree:
        everyone = fdp.all_gather(batch["x"])
        return {"w": state["w"] + fdp.pmean(batch["x"][batch["index"]]), "all": everyone}

    transform = fdp.data_parallel(step)
    state = {"w": torch.zeros(2)}
    good = {"x": torch.arange(4.0), "index": torch.tensor([1, 2])}
    bad = {"x": torch.arange(4.0), "index": torch.tensor([1, 9])}
    expected = {"w": torch.tensor([1.0, 2.0]), "all": torch.arange(4.0)[None]}
    first = transform(state, good)
    for _ in range(2):
        with pytest.raises(IndexError):
            transform(state, bad)
        assert state["w"].tolist() == [0.0, 0.0]
        assert same_bits(transform(state, good), expected)
    assert same_bits(first, expected)
    assert transform.traces == 1


def test_the_users_own_error_is_raised_as_it_is() -> None:
    class Mine(Exception):
        pass

    calls: list[int] = []

    @fdp.data_parallel
    def step(w: Tree, b: Tree) -> Tree:
        calls.append(1)
        if len(b) == 2:
            raise Mine("two")
        return w + fdp.pmean(b)

    for _ in range(2):
        with pytest.raises(Mine, match=r"^two$"):
            step(torch.ones(1), torch.ones(2))
    assert step(torch.ones(1), torch.ones(1)).tolist() == [2.0]
    assert fdp.psum(torch.ones(1)).tolist() == [1.0]  # outside of a step again


def test_shapes_that_do_not_fit_are_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        fdp.data_parallel(lambda w, b: w + fdp.pmean(b))(torch.ones(2), torch.ones(3))
    assert not isinstance(caught.value, fdp.FdpError)


# --- the check of a new trace ------------------------------------------------------------------------


class Counter:
    n = 0


def frozen_python(w: Tree, b: Tree) -> Tree:
    return w * random.random() + fdp.pmean(b)


def frozen_numpy(w: Tree, b: Tree) -> Tree:
    return w * float(np.random.rand()) + fdp.pmean(b)


def frozen_numpy_array(w: Tree, b: Tree) -> Tree:
    return w + torch.as_tensor(np.random.rand(2), dtype=torch.float32) + fdp.pmean(b)


def frozen_small_noise(w: Tree, b: Tree) -> Tree:
    return w + 1e-3 * random.random() + fdp.pmean(b)


def frozen_seed(w: Tree, b: Tree) -> Tree:
    torch.manual_seed(1)
    return fdp.pmean(w + torch.rand(2)) + fdp.pmean(b)


def frozen_counter(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return w * Counter.n + fdp.pmean(b)


def frozen_structure(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return [w + fdp.pmean(b)] * (1 + Counter.n % 2)


def frozen_constant(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return w + fdp.pmean(b), Counter.n


FROZEN = [frozen_python, frozen_numpy, frozen_numpy_array, frozen_small_noise, frozen_seed, frozen_counter,
          frozen_structure, frozen_constant]  # fmt: skip


@pytest.mark.parametrize("step", FROZEN, ids=lambda f: f.__name__)
def test_what_a_trace_would_freeze_is_found(step: Callable[..., Any]) -> None:
    Counter.n = 0
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(fdp.TraceError) as caught:
        fdp.data_parallel(step)(torch.ones(2), torch.ones(2))
    lines = str(caught.value).splitlines()
    assert step.__name__ in lines[0] and lines[-1].startswith("Remedy: ")
    if step in (frozen_counter, frozen_python, frozen_numpy):
        assert "output: [2] torch.float32 differs by" in lines[1]


@pytest.mark.parametrize("step", FROZEN, ids=lambda f: f.__name__)
def test_the_check_can_be_switched_off(step: Callable[..., Any]) -> None:
    Counter.n = 0
    transform = fdp.data_parallel(step, check_trace=False)
    one, two = (transform(torch.ones(2), torch.ones(2)) for _ in range(2))
    if step is not frozen_seed:
        assert same_bits_or_equal(one, two)


def test_the_check_does_not_disturb_pythons_random_numbers() -> None:
    """A step that draws none leaves their state as it is; so does one that is refused for drawing them."""
    random.seed(3)
    state = random.getstate()
    fdp.data_parallel(shifted)(torch.ones(2), torch.ones(2))
    assert random.getstate() == state
