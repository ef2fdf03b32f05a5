"""What goes into a step and comes out of it: containers, constants, random numbers, gradients."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from steps import shifted
from torch import nn

import fdp

Tree = Any


class Mode(enum.Enum):
    ADD = 1
    SUBTRACT = 2


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
