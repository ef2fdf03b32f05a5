"""What makes a step trace again: arguments of another signature, and nothing else; and its warning."""

from __future__ import annotations

import enum
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import copied, same_bits, same_bits_or_equal
from samples import some
from steps import shifted

import fdp

Tree = Any


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


@pytest.mark.parametrize("name", some(CHANGES))
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
    import weakref

    step = fdp.data_parallel(shifted, donate_argnums=0)
    state, batch = {"w": torch.ones(3)}, torch.ones(2)
    held = [weakref.ref(state["w"]), weakref.ref(batch)]
    out = step(state, batch)
    out = step(out, batch)
    del state, batch, out
    gc.collect()
    assert [ref() for ref in held] == [None, None]


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
