"""Ranks compile at once: a slow one is waited for, one that fails or dies is an error on the others, in time."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive
from torch.distributed.distributed_c10d import _get_default_store

import fdp

# Both shorter than what the slow rank takes, so that waiting by either of them would fail; and long enough for a rank
# on a slow machine to come.
AGREE_S, TIMEOUT_S, SLOW_S = 3.0, 5.0, 7.0
ENV = {"FDP_AGREE_TIMEOUT_S": str(AGREE_S), "RANKS_TIMEOUT_S": str(TIMEOUT_S)}


def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return w - 0.1 * fdp.grad(lambda w: (batch @ w).tanh().square().mean())(w)


def call_step() -> torch.Tensor:
    return fdp.data_parallel(step, compile=True)(torch.ones(3, 2), torch.ones(4, 3) * (1 + dist.get_rank()))


def meanwhile(act: Any) -> None:
    """Let rank 1 do something else before it compiles."""
    from fdp.step import first_call

    compile = first_call.Emitted

    def emitted(*args: Any) -> Any:
        if len(args) > 4 and args[4].compiles and dist.get_rank() == 1:
            act()
        made = compile(*args)
        if len(args) > 4 and args[4].compiles and dist.get_rank() == 0:
            _get_default_store().set("rank 0 has compiled", "")
        return made

    first_call.Emitted = emitted  # type: ignore[misc, assignment]


def one_is_slow() -> tuple[torch.Tensor, float]:
    begun = time.monotonic()

    def sleep() -> None:
        # Not before the other rank is waiting: how long it takes itself must not count.
        _get_default_store().wait(["rank 0 has compiled"], datetime.timedelta(seconds=60))
        time.sleep(SLOW_S)

    meanwhile(sleep)
    return call_step(), time.monotonic() - begun


def one_fails() -> tuple[str, str, float]:
    def fail() -> None:
        raise fdp.CompileError("no compiler here.\nRemedy: none.")

    meanwhile(fail)
    begun = time.monotonic()
    with pytest.raises(fdp.FdpError) as caught:
        call_step()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


def one_fails_at_first() -> torch.Tensor:
    """Both call again after rank 1 could not compile."""
    left = ["no disk space left"]

    def fail_once() -> None:
        if left:
            raise fdp.CompileError(left.pop())

    from fdp.step import first_call

    kept = first_call.Emitted
    meanwhile(fail_once)
    try:
        called = fdp.data_parallel(step, compile=True)
        arguments = torch.ones(3, 2), torch.ones(4, 3) * (1 + dist.get_rank())
        with pytest.raises(fdp.FdpError):
            called(*arguments)
        return called(*arguments)
    finally:
        first_call.Emitted = kept  # type: ignore[misc]


def one_does_not_compile() -> tuple[str, str]:
    called = fdp.data_parallel(step, compile=dist.get_rank() == 0)
    with pytest.raises(fdp.FdpError) as caught:
        called(torch.ones(3, 2), torch.ones(4, 3))
    return type(caught.value).__name__, str(caught.value)


def two_threads() -> list[torch.Tensor]:
    """Each thread has a group and a step of its own; ranks come to them in another order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    results: dict[int, torch.Tensor] = {}

    def train(number: int) -> None:
        called = fdp.data_parallel(step, compile=True, group=groups[number])
        results[number] = called(torch.ones(3, 2), torch.ones(4, 3) * (1 + dist.get_rank()))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    order = threads if dist.get_rank() == 0 else threads[::-1]
    for thread in order:
        thread.start()
        time.sleep(0.5)  # so that each rank is preparing another step first
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(2)]


def one_is_killed() -> tuple[str, str, float]:
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGKILL))
    begun = time.monotonic()
    with pytest.raises(fdp.FdpError) as caught:
        call_step()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


@exhaustive
def test_a_rank_that_compiles_for_long_is_waited_for() -> None:
    outcomes = ranks.run_fresh(2, one_is_slow, env=ENV, deadline_s=90)
    assert all(outcome.ok for outcome in outcomes), "\n".join(outcome.describe() for outcome in outcomes)
    (first, waited_s), (second, _) = (outcome.value for outcome in outcomes)
    assert waited_s > SLOW_S
    assert torch.equal(first, second)


def test_a_rank_that_fails_to_compile_is_named_by_the_others() -> None:
    # The limits are those of the pool: what must not take as long as they is to hear of the failure.
    outcomes = ranks.run_fresh(2, one_fails, env={"FDP_AGREE_TIMEOUT_S": "60"}, deadline_s=90)
    assert all(outcome.ok for outcome in outcomes), "\n".join(outcome.describe() for outcome in outcomes)
    (other, message, waited_s), (own, own_message, _) = (outcome.value for outcome in outcomes)
    assert (own, own_message) == ("CompileError", "no compiler here.\nRemedy: none.")
    assert other == "AgreementError"
    assert "rank 1: CompileError: no compiler here." in message
    assert "'step'" in message and "compile=False" in message.splitlines()[-1]
    assert waited_s < 50


@exhaustive
def test_ranks_that_try_again_do_it_together() -> None:
    first, second = ranks.run(2, one_fails_at_first)
    assert torch.equal(first, second)


def test_ranks_that_compile_otherwise_are_told() -> None:
    for name, message in ranks.run(2, one_does_not_compile):
        assert name == "AgreementError"
        assert "rank 0: compiled with Options(" in message and "rank 1: nothing of the kind" in message


def test_threads_that_prepare_steps_of_two_groups_do_not_wait_for_each_other() -> None:
    for one, two in zip(*ranks.run(2, two_threads), strict=True):
        assert torch.equal(one, two)


def test_a_rank_that_is_killed_while_it_compiles_is_missed() -> None:
    outcomes = ranks.run_fresh(2, one_is_killed, env=ENV, deadline_s=90, grace_s=60)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert outcomes[0].ok, outcomes[0].describe()
    name, message, waited_s = outcomes[0].value
    assert name == "PeerError"
    assert "rank 1 died" in message
    # Its own compilation, and the patience.
    assert waited_s < 40
