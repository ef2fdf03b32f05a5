"""A step called from two threads, from within itself, from a signal handler; and one that fails in the middle.

It works, or it is refused with an error of fdp's that says what to do; the state that went in without donation is what
it was; and the next call works. With several ranks a rank that left a step stays out.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from bits import same_bits
from samples import some

import fdp
from fdp.runtime.residence import Residence

Tree = Any

_during: list[Callable[[], Any]] = []
"""What the operator `fdp_test::moment` does when it runs, once."""


@torch.library.custom_op("fdp_test::moment", mutates_args=())
def moment(x: torch.Tensor) -> torch.Tensor:
    """A copy of its input; while it is made, anything may happen."""
    if _during:
        _during.pop()()
    return x.clone()


@moment.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def eventful(state: Tree, batch: Tree) -> Tree:
    """A step that has written a part of its results when the event happens, and makes the rest from it."""
    mean = fdp.pmean(batch.mean())
    first = state["a"] * 2 + mean
    return {"a": first, "b": state["b"] + moment(first).sum(), "all": fdp.all_gather(batch)}


def new_state() -> Tree:
    return {"a": torch.arange(3.0), "b": torch.ones(2), "all": torch.zeros(1, 2)}


def ready(donate: Any = ()) -> Any:
    """A step that has been traced and run."""
    step = fdp.data_parallel(eventful, donate_argnums=donate, check_trace=False)
    assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
    return step


EXPECTED = {"a": torch.tensor([1.0, 3.0, 5.0]), "b": torch.tensor([10.0, 10.0]), "all": torch.ones(1, 2)}


# --- a step in a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_a_call_from_inside_of_the_run_is_refused(donate: Any) -> None:
    step = ready(donate)
    refused: list[BaseException] = []

    def call_again() -> None:
        with pytest.raises(fdp.FdpError, match=r"(?s)was called while it was running.*Remedy: ") as caught:
            step(new_state(), torch.ones(2))
        refused.append(caught.value)

    _during.append(call_again)
    assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
    assert len(refused) == 1
    assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)


def test_an_uncaught_refusal_ends_the_outer_call() -> None:
    step = ready()
    state = new_state()
    _during.append(lambda: step(state, torch.ones(2)))
    with pytest.raises(fdp.FdpError, match="was called while it was running"):
        step(state, torch.ones(2))
    assert same_bits(state, new_state())
    assert same_bits(step(state, torch.ones(2)), EXPECTED)


def test_another_signature_or_another_step_may_run_inside_of_the_run() -> None:
    """In a world of one nothing is sent, and each program has memory of its own."""
    step = ready()
    other = fdp.data_parallel(lambda w, b: w + fdp.pmean(b))
    seen: list[Any] = []

    def call_others() -> None:
        seen.append(step(new_state(), torch.ones(4))["all"].tolist())
        seen.append(other(torch.ones(1), torch.ones(1)).tolist())

    _during.append(call_others)
    assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
    assert seen == [[[1.0] * 4], [2.0]]


def test_a_signal_handler_that_calls_the_step_is_refused() -> None:
    step = ready()
    seen: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        try:
            step(new_state(), torch.ones(2))
        except fdp.FdpError as error:
            seen.append(str(error).splitlines()[-1])

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        _during.append(lambda: signal.raise_signal(signal.SIGUSR2))
        assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == ["Remedy: call it from one thread, or make a second step with fdp.data_parallel."]
    assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)


# --- errors ------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


@pytest.mark.parametrize("kind", [RuntimeError, Interrupted])
def test_an_error_in_the_middle_leaves_kept_state_as_it_was(kind: type[BaseException]) -> None:
    step = ready()
    state, batch = new_state(), torch.ones(2)

    def fail() -> None:
        raise kind("in the middle")

    for _ in range(2):
        _during.append(fail)
        with pytest.raises(kind, match="in the middle"):
            step(state, batch)
        assert same_bits(state, new_state()) and batch.tolist() == [1.0, 1.0]
        assert same_bits(step(state, batch), EXPECTED)
    assert step.traces == 1


@pytest.mark.parametrize("kind", [RuntimeError, Interrupted])
def test_after_an_error_a_donating_step_goes_on_with_new_state(kind: type[BaseException]) -> None:
    step = ready(0)

    def fail() -> None:
        raise kind("in the middle")

    for _ in range(2):
        _during.append(fail)
        with pytest.raises(kind, match="in the middle"):
            step(new_state(), torch.ones(2))
        assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
    assert step.traces == 1


def test_what_was_returned_before_an_error_stays_what_it_was() -> None:
    step = ready()
    first = step(new_state(), torch.ones(2))

    def fail() -> None:
        raise RuntimeError("in the middle")

    _during.append(fail)
    with pytest.raises(RuntimeError):
        step(first, torch.full((2,), 9.0))
    step(first, torch.full((2,), 9.0))
    assert same_bits(first, EXPECTED)


def test_an_interrupted_trace_is_begun_anew() -> None:
    """Whatever was switched for tracing is switched back, and nothing half made is kept."""
    interrupts = [Interrupted("while tracing")]

    @fdp.data_parallel
    def step(w: Tree, b: Tree) -> Tree:
        if interrupts:
            raise interrupts.pop()
        return w + fdp.pmean(b)

    with pytest.raises(Interrupted):
        step(torch.ones(1), torch.ones(1))
    assert not torch.compiler.is_compiling()
    assert step(torch.ones(1), torch.ones(1)).tolist() == [2.0]
    assert fdp.psum(torch.ones(1)).tolist() == [1.0]


# --- threads -----------------------------------------------------------------------------------------------


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(k)` on that many threads that begin at once; their results, or what they raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(k: int) -> None:
        barrier.wait(60)
        try:
            results[k] = work(k)
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return results


def test_threads_that_bring_one_new_signature_trace_it_once() -> None:
    step = fdp.data_parallel(eventful)
    right = 0
    for result in together(4, lambda k: step(new_state(), torch.ones(2))):
        if isinstance(result, fdp.FdpError):
            assert "was called while it was running" in str(result)
        else:
            assert same_bits(result, EXPECTED)
            right += 1
    assert right and step.traces == 1


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_threads_with_signatures_of_their_own_get_their_own_results(donate: Any) -> None:
    """Some new, some known, some alternating: caches are read and written by all at once."""

    def work(k: int) -> int:
        right = 0
        for turn in range(60):
            width = 1 + (k + turn // 20) % 5
            state = {"w": torch.full((width,), float(k))}
            try:
                out = step(state, torch.full((width,), float(turn)))
            except fdp.FdpError as error:
                assert "was called while it was running" in str(error)
                out = None
            if donate == () or out is None:
                assert state["w"].tolist() == [float(k)] * width
            if out is not None:
                assert out["w"].tolist() == [k * 2.0 + turn] * width
                right += 1
        return right

    step = fdp.data_parallel(lambda s, b: {"w": s["w"] * 2 + fdp.pmean(b)}, donate_argnums=donate, check_trace=False)
    results = together(4, work)
    assert all(isinstance(right, int) and right > 0 for right in results), results
    assert step.traces == 5


def test_a_step_runs_while_others_are_traced() -> None:
    """Tracing sets switches of the whole process; a program that runs meanwhile must not be touched by them."""
    step = ready()
    stop = threading.Event()

    def work(k: int) -> Any:
        if k == 0:
            try:
                for width in range(1, 6):
                    fresh = fdp.data_parallel(lambda w, b: fdp.grad(lambda w: (w * b).square().sum())(w))
                    assert fresh(torch.ones(width), torch.ones(width)).tolist() == [2.0] * width
            finally:
                stop.set()
            return 1
        count = 0
        while not stop.is_set() or not count:
            assert same_bits(step(new_state(), torch.ones(2)), EXPECTED)
            count += 1
        return count

    results = together(2, work)
    assert all(isinstance(count, int) and count > 0 for count in results), results


# --- several ranks -------------------------------------------------------------------------------------------


def during_a_run(where: str) -> list[str]:
    """What happens to a step that is called while another one of the same group runs, and to the calls after it."""
    outer = fdp.data_parallel(lambda w, b: w + moment(fdp.pmean(b)), check_trace=False)
    inner = fdp.data_parallel(lambda w, b: w - fdp.pmean(b), check_trace=False)
    w, b = torch.ones(2), torch.ones(2)
    for step in (outer, inner):
        step(w, b)
    seen: list[str] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            seen.append(str(call().tolist()))
        except fdp.FdpError as error:
            assert "\nRemedy: " in str(error)
            seen.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    if where == "itself":
        _during.append(lambda: attempt(lambda: inner(w, b)))
    else:
        _during.append(lambda: (t := threading.Thread(target=lambda: attempt(lambda: inner(w, b)))).start() or t.join())
    attempt(lambda: outer(w, b))
    attempt(lambda: inner(w, b))
    assert w.tolist() == b.tolist() == [1.0, 1.0]
    return seen


@pytest.mark.parametrize("where", some(["itself", "a thread"]))
def test_two_steps_never_run_at_once_on_a_group(where: str) -> None:
    """Ranks pair messages by their order, and another rank may have run the two in another order."""
    for outcome in ranks.run_fresh(2, during_a_run, where, deadline_s=60):
        refused, finished, later = outcome.value
        assert refused.startswith("PeerError: step '<lambda>' was called on rank "), refused
        assert "while step '<lambda>' was running on the same process group" in refused
        assert finished == "[2.0, 2.0]"
        assert later.startswith("PeerError: ") and "desynchronised" in later


def test_an_interrupt_at_any_line_of_a_call_leaves_the_step_usable() -> None:
    """Where the call has begun and no `finally` is in force yet, and in the `finally` itself."""
    step, code = ready(), Residence.call.__code__
    lines = sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno})
    reached = 0
    for line in lines:

        def interrupt(frame: Any, event: str, argument: Any, line: int = line) -> Any:
            if frame.f_code is not code:
                return None
            if event == "line" and frame.f_lineno == line:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            step(new_state(), torch.ones(2))
        except KeyboardInterrupt:
            reached += 1
        finally:
            sys.settrace(before)
        assert same_bits(step(new_state(), torch.ones(2)), EXPECTED), line
    assert reached >= 8
