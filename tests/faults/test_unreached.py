"""Monitors that cannot reach each other: one warning on each rank, and training goes on."""

from __future__ import annotations

import pathlib

from programs import end_ranks, printed_events, start_ranks
from samples import exhaustive

PROGRAM = pathlib.Path(__file__).with_name("program.py")


@exhaustive
def test_each_rank_warns_once_and_no_rank_is_called_dead(tmp_path: pathlib.Path) -> None:
    # Rank 1 sleeps for twelve seconds; rank 0 waits for it, much longer than for a rank that is lost.
    arguments = ["behind a firewall", "1", str(tmp_path)]
    started = start_ranks(PROGRAM, arguments, 2, forked=range(2), FDP_LIVENESS_S="1", CALLS="60")
    printed = end_ranks(started, 200)
    assert [process.returncode for process in started] == [0, 0], printed
    assert [line["event"] for line in printed_events(tmp_path) if line["event"] == "error"] == [], printed_events(
        tmp_path
    )
    for rank, text in enumerate(printed):
        assert text.count("cannot reach") == 1, text
        assert f"the process that watches rank {rank} cannot reach that of rank {1 - rank} at 127.0.0.2:" in text
        assert "(Connection refused)" in text
        assert "Training goes on." in text
        assert "FDP_LIVENESS_S=0" in text
