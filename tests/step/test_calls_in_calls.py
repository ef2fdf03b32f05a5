"""Steps inside of steps, in several threads, and with errors in the middle: each call is one of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from bits import same_bits

import fdp

Tree = Any


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
