"""A rank that dies, and a rank that never comes: an error on the others within the time limit, never a hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from refusal_texts import check_message
from samples import exhaustive
from steps import sgd_step

import fdp


def die_after(steps: int, victim: int) -> tuple[str, list[str], str, float]:
    rank = dist.get_rank()
    step = fdp.data_parallel(sgd_step)
    state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    for i in range(steps + 5):
        if i == steps and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            state = step(state, {"x": torch.full((2,), 0.1 * (rank + 1))})
        except Exception as error:  # the test looks at what it is
            names = [c.__name__ for c in type(error).__mro__]
            return "raised", names, str(error), time.monotonic() - start
    return "finished", [], "", 0.0


@pytest.mark.parametrize(
    ("steps", "world"), [(0, 2), (3, 4), *(pytest.param(*each, marks=exhaustive) for each in ((0, 4), (3, 2)))]
)
def test_a_killed_rank_is_an_error_on_the_others(world: int, steps: int) -> None:
    """Whether it dies before the first agreement or in the middle of training; and no rank waits for ever."""
    victim = 1
    env = {"FDP_AGREE_TIMEOUT_S": "5", "RANKS_TIMEOUT_S": "10"}
    outcomes = ranks.run_fresh(world, die_after, steps, victim, env=env, deadline_s=60, grace_s=50)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        assert outcome.ok, outcome.describe()
        status, names, message, waited_s = outcome.value
        assert status == "raised"
        assert "PeerError" in names or (steps == 0 and "AgreementError" in names), (names, message)
        assert waited_s < 30
        check_message(message, "sgd_step")


def leave_rank_alone(limit_s: float) -> tuple[str, float]:
    if dist.get_rank() == 1:
        time.sleep(limit_s + 4)  # alive, and busy with something else
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(fdp.AgreementError) as caught:
        fdp.data_parallel(sgd_step)({"a": torch.ones(3)}, {"x": torch.ones(2)})
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_never_comes_is_named_after_the_time_limit() -> None:
    outcomes = ranks.run_fresh(2, leave_rank_alone, 3.0, env={"FDP_AGREE_TIMEOUT_S": "3"}, deadline_s=40)
    assert all(o.ok for o in outcomes), outcomes[0].describe()
    message, waited_s = outcomes[0].value
    assert 2.5 < waited_s < 8
    check_message(message, "sgd_step", "rank 1", "3")
