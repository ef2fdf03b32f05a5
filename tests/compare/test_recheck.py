"""When a program is compared once more, and when it is not for want of memory."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from compared import made

import fdp
from fdp.compare import fits_in_memory, recheck
from fdp.step import comparisons


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_comes_again_for_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, compared = Clock(), list[int]()
    monkeypatch.setattr(recheck, "clock", clock)
    plan = recheck.Again(first_s=5.0, owed=False)
    for call in range(2, 5000):
        clock.now += 1.0 if call != plan.at else 0.0
        if call == plan.at:

            def compare(call: int = call) -> bool:
                compared.append(call)
                clock.now += 4.0
                return True

            def run() -> None:
                clock.now += 1.0

            plan.look(compare, run)
            assert plan.spent_s <= 0.01 * call
    assert compared == [512, 1024, 2048, 4096]


def test_what_is_owed_comes_whatever_it_takes_and_until_nothing_is_refused() -> None:
    plan, compared = recheck.Again(first_s=1e9, owed=True), list[int]()

    def refuses() -> bool:
        raise fdp.TraceError("no")

    def agrees() -> bool:
        compared.append(plan.at)
        return True

    assert plan.at == 2
    for call in (3, 4):
        with pytest.raises(fdp.TraceError):
            plan.look(refuses, lambda: pytest.fail("what was refused ran"))
        assert plan.at == call  # the next call is looked at again
    assert plan.look(agrees, lambda: "ran") == "ran"
    assert len(compared) == 1
    plan.look(lambda: pytest.fail("there is no time for it"), lambda: None)


def test_what_the_first_inputs_hide_is_found_before_the_second_call() -> None:
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        # A number that the trace holds fast; with a state of zeros it would not show.
        return {"m": state["m"] * (2.0 if tracing else 3.0) + fdp.pmean(x)}

    tracing = True
    checked = fdp.data_parallel(step, donate_argnums=0)
    original = comparisons.check_program

    def untraced(*args: Any, **kwargs: Any) -> Any:
        nonlocal tracing
        tracing = False
        return original(*args, **kwargs)

    with mock.patch.object(comparisons, "check_program", untraced):
        first = checked({"m": torch.zeros(3)}, torch.ones(3))
    assert torch.equal(first["m"], torch.ones(3))  # which is right
    for _ in range(2):
        with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
            checked(first, torch.ones(3))
    assert torch.equal(first["m"], torch.ones(3))


def test_a_number_that_changed_out_of_sight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "SHARE", 1e9)
    rate = np.array([0.1])  # of which a step that is called looks at the identity, not at the contents
    step = fdp.data_parallel(lambda w, x: w - float(rate[0]) * x.sum(), check_replication=False)
    w, x = torch.ones(2), torch.ones(2)
    for _ in range(5):  # the first look measures a call, and the one at call 4 compares
        step(w, x)
    rate[0] = 0.2
    for _ in range(2):
        step(w, x)
    with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
        step(w, x)  # call 8
    unchecked = fdp.data_parallel(lambda w, x: w - float(rate[0]) * x.sum(), check_replication=False, check_trace=False)
    for call in range(9):
        rate[0] = float(call)
        unchecked(w, x)


def test_what_does_not_fit_is_skipped_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum()))
    monkeypatch.setattr(fits_in_memory, "available_bytes", lambda device: 3)
    with pytest.warns(UserWarning, match="comparison at the first call of step .* was skipped: it takes about"):
        step(torch.ones(8), torch.ones(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            step(torch.ones(8), torch.ones(8))


def test_memory_that_runs_out_on_the_way_is_no_mistake_of_the_step() -> None:
    emitted, _, _ = made(lambda w, x: w + fdp.pmean(x), torch.ones(2), torch.ones(2))

    def no_memory() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def another() -> None:
        raise RuntimeError("something else")

    with pytest.warns(UserWarning, match="memory ran out"):
        assert not fits_in_memory.if_memory_allows(emitted, "the comparison", no_memory)
    with pytest.raises(RuntimeError, match="something else"):
        fits_in_memory.if_memory_allows(emitted, "the comparison", another)
    assert fits_in_memory.needed_bytes(emitted)[torch.device("cpu")] >= 3 * 8
    assert 0 < fits_in_memory.available_bytes(torch.device("cpu")) <= 2**62
