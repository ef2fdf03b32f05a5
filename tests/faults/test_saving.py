"""A rank that is killed or frozen while all save: the others raise and name it, and the last checkpoint is whole."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive

import fdp
from fdp.state.storage import CheckpointWriter

VICTIM = 2


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "n": torch.tensor(step)}


def save_and_stop(folder: str, number: int, blocking: bool) -> dict[str, Any]:
    """Save twice; the second time one rank is sent a signal when it is to write its files."""
    store = dist.distributed_c10d._get_default_store()
    manager = fdp.CheckpointManager(folder)
    manager.save(1, state_of(1), blocking=True)
    if dist.get_rank() == VICTIM:
        store.set("victim", str(os.getpid()))

        def stop(self: CheckpointWriter, *args: Any) -> Any:
            os.kill(os.getpid(), number)
            time.sleep(60)

        CheckpointWriter.write_data = stop  # type: ignore[method-assign]
    dist.barrier()
    begun_s = time.monotonic()
    with pytest.raises(fdp.PeerError) as caught:
        manager.save(2, state_of(2), blocking=blocking)
        manager.wait_until_finished()
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the others need what has died or is frozen no longer
        if number == signal.SIGSTOP:
            os.kill(int(store.get("victim")), signal.SIGKILL)
    error = caught.value
    return {"ranks": error.ranks, "reason": error.reason, "after_s": time.monotonic() - begun_s, "text": str(error)}


@pytest.mark.parametrize(
    ("number", "reason", "blocking"),
    [
        (signal.SIGKILL, "died", False),
        pytest.param(signal.SIGSTOP, "frozen", True, marks=exhaustive),
        pytest.param(signal.SIGKILL, "died", True, marks=exhaustive),
        pytest.param(signal.SIGSTOP, "frozen", False, marks=exhaustive),
    ],
)
def test_the_others_name_it(number: int, reason: str, blocking: bool, tmp_path: pathlib.Path) -> None:
    outcomes = ranks.run_fresh(
        3, save_and_stop, str(tmp_path), int(number), blocking, env={"FDP_LIVENESS_S": "2"}, deadline_s=90, grace_s=60
    )
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.ok, outcome.describe()
        said = outcome.value
        assert (said["ranks"], said["reason"]) == ((VICTIM,), reason), said
        assert said["after_s"] < 12, said
    manager = fdp.CheckpointManager(tmp_path)
    assert manager.latest_step() == 1
    restored, step = manager.restore(state_of(0), random=False)
    assert step == 1
    assert torch.equal(restored["w"], state_of(1)["w"])
