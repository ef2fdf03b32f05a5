"""Whatever becomes of a rank, every other rank raises within seconds and names it; who is only slow is waited for."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from faulty_ranks import AT, Said, is_remedied, train
from samples import exhaustive

import fdp
from fdp.runtime import order

LIVENESS_S = 3


def survivors(kind: str, victim: int, world: int, **kwargs: Any) -> list[Said]:
    """What the ranks say that nothing is wrong with."""
    outcomes = ranks.run_fresh(
        world, train, kind, victim, env={"FDP_LIVENESS_S": str(LIVENESS_S)}, deadline_s=90, grace_s=60, **kwargs
    )
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.ok or outcome.exitcode == -signal.SIGKILL, outcome.describe()
        else:
            assert outcome.ok, outcome.describe()
    return [outcome.value for outcome in outcomes if outcome.rank != victim]


EXPECTED = [
    # what a rank does, reason, seconds within which all others know, words in the message
    ("killed between steps", "died", 10, "rank {} died"),
    ("killed in a step", "died", 10, "rank {} died"),
    ("killed in the first call", "died", 15, "rank {} died: preparing call 1 of step 'model'"),
    ("frozen", "frozen", 5 + LIVENESS_S, "rank {} is frozen"),
    ("raised in a step", "raised", 10, "rank {} raised: "),
    ("raised in a loader", "raised", 10, "rank {}: OSError: no such shard"),
    (
        "destroyed its group",
        "left",
        10,
        "rank {} left: it has destroyed the process group (in its own code, ",
    ),
    (
        "destroyed a group that it refers to",
        "left",
        10,
        "rank {} left: it has destroyed the process group (in its own code, ",
    ),
]


ALIKE = ("killed between steps", "frozen", "destroyed a group that it refers to")
"""What default runs show elsewhere: test_programs.py, test_faults_in_exchanges.py; and groups are destroyed alike."""


@pytest.mark.parametrize(
    ("kind", "reason", "limit_s", "words"),
    [pytest.param(*each, marks=exhaustive if each[0] in ALIKE else (), id=each[0]) for each in EXPECTED],
)
def test_every_other_rank_names_it(kind: str, reason: str, limit_s: float, words: str) -> None:
    victim = 2
    for said in survivors(kind, victim, 3):
        assert (said["error"], said["ranks"], said["reason"]) == ("PeerError", (victim,), reason), said
        assert said["after_s"] < limit_s, said
        assert words.format(victim) in said["text"], said
        assert is_remedied(said["text"]), said
        if kind not in ("raised in a loader", "killed in the first call", "killed in a step"):
            assert said["call"] == AT, said


@exhaustive
@pytest.mark.parametrize(("kind", "reason"), [each[:2] for each in EXPECTED])
@pytest.mark.parametrize(("victim", "world"), [(0, 2), (1, 2), (0, 4), (3, 4)])
def test_every_other_rank_names_it_whichever_it_is(kind: str, reason: str, victim: int, world: int) -> None:
    for said in survivors(kind, victim, world):
        assert (said["error"], said["ranks"], said["reason"]) == ("PeerError", (victim,), reason), said


@pytest.mark.parametrize("kind", [pytest.param("asleep", marks=exhaustive), "holds the lock"])
def test_a_rank_that_is_only_slow_is_waited_for(kind: str) -> None:
    """Twice as long as a rank may be silent: it is its monitor that speaks, and that nothing stops."""
    for said in survivors(kind, 1, 2, seconds=2.0 * LIVENESS_S + 1):
        assert not said["error"], said
        assert said["at"] == 8


def two_die() -> Said | None:
    dist.barrier()
    if dist.get_rank() in (1, 3):
        fdp.psum(torch.ones(1))
        time.sleep(0.3)
        import os

        os.kill(os.getpid(), signal.SIGKILL)
    fdp.psum(torch.ones(1))
    with pytest.raises(fdp.PeerError) as caught:
        fdp.psum(torch.ones(1))
    return {"ranks": caught.value.ranks, "reason": caught.value.reason, "call": caught.value.call}


def test_two_that_die_at_once_are_both_named_outside_of_a_step_too() -> None:
    outcomes = ranks.run_fresh(4, two_die, env={"FDP_LIVENESS_S": str(LIVENESS_S)}, deadline_s=60, grace_s=40)
    for outcome in outcomes:
        if outcome.rank in (0, 2):
            assert outcome.value == {"ranks": (1, 3), "reason": "died", "call": 0}, outcome.describe()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no str")


def raises_without_a_text() -> tuple[str, str]:
    """Rank 1 raises an error whose text cannot be made, in a later call, while it traces."""
    raises = False

    def model(w: Any, batch: Any) -> Any:
        if raises:
            raise Mute
        return w + fdp.pmean(batch @ w)

    step, w = fdp.data_parallel(model), torch.ones(2, 2)
    step(w, torch.ones(2, 2))
    raises = dist.get_rank() == 1
    try:
        step(w, torch.ones(3 if raises else 2, 2))
    except Exception as error:
        return type(error).__name__, "" if raises else str(error)
    return "", ""


def test_an_error_whose_text_cannot_be_made_is_told_by_its_class() -> None:
    outcomes = ranks.run_fresh(2, raises_without_a_text, env={"FDP_LIVENESS_S": "3"}, deadline_s=60)
    assert outcomes[1].value[0] == "Mute", outcomes[1].describe()
    assert outcomes[0].value[0] == "PeerError", outcomes[0].describe()
    assert "rank 1 raised: Mute: (its text cannot be made)" in outcomes[0].value[1]


def catches_and_calls_again() -> str:
    known = order.known_loss
    # That it has gone on is told later than that it raised: the message may come first.
    order.known_loss = lambda *args, believing: known(*args, believing) or (None if believing else fdp.PeerError("old"))
    rank = dist.get_rank()
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b @ w))
    w = torch.ones(2, 2)
    with pytest.raises(fdp.AgreementError) as caught:
        for call in range(4):
            if rank == 1 and call == 2:
                with pytest.raises(RuntimeError):
                    step(w, torch.ones(2, 3))
                time.sleep(0.4)  # less than others wait for who has raised
            w = step(w, torch.ones(2, 2))
    assert call == 2
    return str(caught.value)


def test_an_error_that_one_rank_alone_deals_with_is_told_to_all() -> None:
    """It is unknown whether its next call is the same call or the following one."""
    for outcome in ranks.run_fresh(2, catches_and_calls_again, deadline_s=60):
        assert outcome.ok and "of its calls 1 raised and sent nothing" in outcome.value, outcome.describe()


def all_are_refused_and_call_again(slow: int, refused: int) -> torch.Tensor:
    """Every rank is refused before a message is sent; one of them takes its time until it makes the call again."""
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b @ w))
    w = torch.ones(2, 2)
    for call in range(3):
        if call == 1:
            for _ in range(refused):
                with pytest.raises(RuntimeError):
                    step(w, torch.ones(2, 3))
            if dist.get_rank() == slow:
                time.sleep(2.0)  # more than others wait for who has raised
        w = step(w, torch.ones(2, 2))
    return w


@pytest.mark.parametrize(("slow", "refused"), [pytest.param(0, 1, marks=exhaustive), (1, 2)])
def test_a_refusal_on_all_ranks_ends_nothing_however_late_one_of_them_goes_on(slow: int, refused: int) -> None:
    one, other = ranks.run(2, all_are_refused_and_call_again, slow, refused)
    assert torch.equal(one, other)
    assert torch.equal(one, torch.full((2, 2), 27.0))


def who_is_refused_alone_again(caught_before: bool) -> str:
    """Rank 1 is refused in a call in which rank 0 waits for it, twice if it catches the first refusal."""
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b @ w))
    w = step(torch.ones(2, 2), torch.ones(2, 2))
    try:
        if dist.get_rank() == 1:
            for _ in range(1 + caught_before):
                with pytest.raises(RuntimeError):
                    step(w, torch.ones(2, 3))
        else:
            step(w, torch.ones(2, 2))
    except fdp.PeerError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("caught_before", [pytest.param(False, marks=exhaustive), True])
def test_who_is_refused_alone_is_named_in_each_attempt(caught_before: bool) -> None:
    outcomes = ranks.run_fresh(2, who_is_refused_alone_again, caught_before, env={"FDP_LIVENESS_S": "3"})
    assert [outcome.value for outcome in outcomes] == ["raised", ""], [outcome.describe() for outcome in outcomes]


def raises_together() -> int:
    """Every rank raises in the same calls, one of them takes its time over it."""
    step, caught = fdp.data_parallel(_with_gradient, check_finite=True), 0
    w = torch.ones(2)
    for call in range(6):
        batch = torch.full((2,), float("nan") if call in (2, 4) else 1.0)
        try:
            w, _ = step(w, batch)
        except fdp.NonFiniteError:
            caught += 1
            if dist.get_rank() == 1:
                time.sleep(2.5)
    return caught


def _with_gradient(w: Any, batch: Any) -> Any:
    loss, grad = fdp.value_and_grad(lambda w: (w * batch).sum())(w)
    return w - grad, fdp.pmean(loss)


def test_a_rank_that_is_slow_to_deal_with_an_error_of_all_ranks_is_waited_for() -> None:
    assert ranks.run(2, raises_together) == [2, 2]


def off() -> tuple[bool, str]:
    from fdp.distributed.liveness.watch import watched_ranks

    fdp.psum(torch.ones(1))
    return watched_ranks(dist.group.WORLD) is None, str(fdp.psum(torch.ones(1)).item())


def test_it_can_be_turned_off() -> None:
    outcomes = ranks.run_fresh(2, off, env={"FDP_LIVENESS_S": "0"})
    assert [outcome.value for outcome in outcomes] == [(True, "2.0")] * 2
