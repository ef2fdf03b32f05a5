"""A rank is gone while the others save, in waits of torch's that nothing interrupts: they raise all the same."""

from __future__ import annotations

import pathlib

import pytest
from programs import end_ranks, printed_events, start_ranks

PROGRAM = pathlib.Path(__file__).with_name("program.py")


@pytest.mark.parametrize(
    ("kind", "victim", "reason"),
    [
        # The others wait for it in the store, to connect to it: for as long as the process group may take.
        ("killed in the making of a group for a save", 2, "died"),
        # It holds the store, which does not answer any more: to look into it does not come back.
        ("frozen before a save", 0, "frozen"),
    ],
)
def test_every_other_rank_names_it(kind: str, victim: int, reason: str, tmp_path: pathlib.Path) -> None:
    arguments = [kind, str(victim), str(tmp_path)]
    started = start_ranks(PROGRAM, arguments, 3, forked=range(3), FDP_LIVENESS_S="3")
    others = [process for rank, process in enumerate(started) if rank != victim]
    printed = "\n".join(end_ranks(others, 60))
    started[victim].kill()
    end_ranks([started[victim]], 10)
    assert "it did not end in time" not in printed, printed
    lines = printed_events(tmp_path)
    (fault,) = [line for line in lines if line["event"] == "fault"]
    errors = [line for line in lines if line["event"] == "error"]
    assert sorted(error["rank"] for error in errors) == sorted({0, 1, 2} - {victim}), printed
    for error in errors:
        assert (error["ranks"], error["reason"]) == ([victim], reason), error
        assert error["when_s"] - fault["when_s"] < 15, error
