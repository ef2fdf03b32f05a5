"""Messages outside of steps that a rank leaves in the middle: what it sends next must not be paired with the rest."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import few

import fdp

Call = Callable[[dict[str, Any]], Any]


def _sharded(state: dict[str, Any]) -> Any:
    return fdp.unshard(state["sharded"])


CALLS: dict[str, Call] = {
    "pmean": lambda state: fdp.pmean(state["w"]),
    "all_gather": lambda state: fdp.all_gather(state["w"]),
    "psum_scatter": lambda state: fdp.psum_scatter(state["w"]),
    "broadcast": lambda state: fdp.broadcast(state["w"]),
    "unshard": _sharded,
    "assert_replicated": lambda state: fdp.assert_replicated(state["w"]),
}


def interrupted(name: str) -> list[str]:
    """Rank 0 waits for rank 1, and leaves."""
    w = torch.ones(4) * (1 if name == "assert_replicated" else dist.get_rank())
    state = {"w": w, "sharded": fdp.shard({"w": torch.ones(4, 2)}, min_size=0)}
    said: list[str] = []

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            CALLS[name](state)
        except KeyboardInterrupt:
            said.append("interrupted")
        for call in (CALLS[name], CALLS["pmean"]):
            try:
                call(state)
            except fdp.PeerError as error:
                said.append(str(error))
    else:
        time.sleep(1.5)
    return said


@pytest.mark.parametrize("name", few(CALLS, 2))
def test_a_message_that_is_left_in_the_middle_is_the_last_one(name: str) -> None:
    left, *calls = ranks.run_fresh(2, interrupted, name, deadline_s=60)[0].value
    assert left == "interrupted" and len(calls) == 2
    for text in calls:
        assert "desynchronised" in text and "was left in the middle by KeyboardInterrupt" in text


def not_sent() -> float:
    with pytest.raises(fdp.ArgumentError):
        fdp.pmean(torch.ones(2, dtype=torch.bool))
    return float(fdp.pmean(torch.tensor(float(dist.get_rank()))))


def test_what_is_refused_before_it_is_sent_leaves_ranks_in_step() -> None:
    assert ranks.run(2, not_sent) == [0.5, 0.5]
