"""Ranks wait for each other in different places: all raise within seconds, and name both. Who is slow is waited for."""

from __future__ import annotations

import pathlib
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive

import fdp


def train(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return w + fdp.pmean(batch.sum())


def other(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return train(w, batch)


def waits_in(places: list[str], folder: str) -> tuple[str, str, float]:
    """Rank by rank another place; the error, its text, and after how many seconds it came."""
    manager, w, step = fdp.CheckpointManager(folder), torch.ones(4), fdp.data_parallel(train)
    for _ in range(3):
        w = step(w, torch.ones(2, 4))
    manager.save(3, {"w": w}, blocking=True)
    begun_s = time.monotonic()
    try:
        match places[dist.get_rank()]:
            case "step":
                step(w, torch.ones(2, 4))
            case "new step":
                fdp.data_parallel(other)(w, torch.ones(2, 4))
            case "message":
                fdp.psum(w)
            case "restore":
                manager.restore({"w": w})
            case "save":
                manager.save(4, {"w": w})
            case "assert_replicated":
                fdp.assert_replicated(w)
    except fdp.FdpError as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    return "", "", 0.0


RESTORE, STEP = "CheckpointManager.restore(step=None, random=True, missing_ok=False)", "call 4 of step 'train'"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (["restore", "step", "step"], (f"rank 0 waits in the store, for {RESTORE}", f" waits in {STEP}")),
        pytest.param(
            ["step", "save", "step"],
            ("rank 1 waits in the store, for CheckpointManager.save(", f" waits in {STEP}"),
            marks=exhaustive,
        ),
        pytest.param(
            ["message", "message", "restore"],
            (f"rank 2 waits in the store, for {RESTORE}", " waits in an all-reduce"),
            marks=exhaustive,
        ),
        pytest.param(
            ["new step", "step", "step"],
            ("rank 0 waits in call 1 of step 'other', in the store", f" waits in {STEP}"),
            marks=exhaustive,
        ),
        pytest.param(
            ["assert_replicated", "step", "step"],
            ("rank 0 waits in an all-gather", f" waits in {STEP}"),
            marks=exhaustive,
        ),
        (["restore", "save", "save"], (f"{RESTORE} was called", "CheckpointManager.save(step=4, ")),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
def test_all_raise_and_name_both(places: list[str], named: tuple[str, str], tmp_path: pathlib.Path) -> None:
    outcomes = ranks.run_fresh(3, waits_in, places, str(tmp_path), env={"FDP_LIVENESS_S": "5"}, deadline_s=90)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        error, text, after_s = outcome.value
        assert error == "AgreementError", outcome
        assert after_s < 10, outcome
        for words in named:
            assert words in text, text


def goes_through_all(late: int) -> int:
    """Steps, messages and exchanges; a rank is late for each, by more than the time after which places are reported."""
    step, w, done = fdp.data_parallel(train), torch.ones(4), 0
    for at in range(3):
        batch = torch.ones(2 + at, 4)
        for what in (lambda batch=batch: step(w, batch), lambda: fdp.psum(w), lambda: fdp.assert_replicated(w)):
            if dist.get_rank() == (late + at) % 3:
                time.sleep(2.6)
            what()
            done += 1
    return done


@exhaustive
def test_who_is_late_again_and_again_is_in_no_other_place() -> None:
    outcomes = ranks.run_fresh(3, goes_through_all, 1, env={"FDP_LIVENESS_S": "1"}, deadline_s=120)
    for outcome in outcomes:
        assert outcome.value == 9, outcome.describe()
