"""The same for programs as users start them: with uncaught errors, and rank 0 that holds the store."""

from __future__ import annotations

import pathlib
import signal
import time

import pytest
from programs import end_ranks, errors_of_others, printed_events, start_ranks
from samples import ALL_SAMPLES, exhaustive

PROGRAM = pathlib.Path(__file__).with_name("program.py")


@pytest.mark.parametrize(
    ("kind", "victim", "reason", "words"),
    [
        pytest.param("raised", 1, "raised", "rank 1 raised: ValueError: a mistake of the user's", marks=exhaustive),
        ("raised, with a hook of its own", 1, "raised", "rank 1 raised: ValueError: a mistake of the user's"),
        ("left", 2, "left", "rank 2 left: its program has ended (in its own code, after call 4 of step 'step')"),
        ("killed", 0, "died", "rank 0 died: in its own code, after call 4 of step 'step'"),
        pytest.param("frozen", 0, "frozen", "rank 0 is frozen", marks=exhaustive),
        pytest.param(
            "killed in the first call", 0, "died", "rank 0 died: preparing call 1 of step 'step'", marks=exhaustive
        ),
        # Perhaps before any other rank knows where its monitor is; as rank 0 it takes the store along.
        pytest.param("killed before the first call", 0, "died", "rank 0 died", marks=exhaustive),
        ("killed before the first call", 1, "died", "rank 1 died: in its own code, before the first call of a step"),
        ("killed before monitors met", 0, "died", "rank 0 died: the store that it held is gone"),
        ("raised before the first call", 0, "raised", "rank 0 raised: ValueError: a mistake of the user's"),
    ],
)
def test_every_other_rank_names_it(kind: str, victim: int, reason: str, words: str, tmp_path: pathlib.Path) -> None:
    # How it ends is what the others hear of: in one case in a process of its own.
    forked = {0, 1, 2} - {victim if kind == "raised" else -1}
    fault, errors = errors_of_others(PROGRAM, kind, victim, tmp_path, forked, 180)
    for error in errors:
        assert (error["ranks"], error["reason"]) == ([victim], reason), error
        assert words in error["text"]
        assert error["when_s"] - fault["when_s"] < 10, error


def test_an_interrupt_ends_all_ranks_soon_and_says_little(tmp_path: pathlib.Path) -> None:
    started = start_ranks(PROGRAM, ["none", "-1", str(tmp_path)], 2, forked=() if ALL_SAMPLES else range(2))
    deadline_s = time.monotonic() + 60
    while len(printed_events(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    begun_s = time.monotonic()
    for process in started:  # as a terminal sends it to all of a job
        process.send_signal(signal.SIGINT)
    printed = end_ranks(started, 30)
    assert time.monotonic() - begun_s < 5
    assert [line["event"] for line in printed_events(tmp_path)].count("interrupted") == 2, printed
    for text in printed:
        assert "KeyboardInterrupt" in text
        assert text.count("  File ") < 40, text  # one traceback: Python underlines more or fewer of its lines


@exhaustive
def test_who_waits_for_a_rank_can_be_interrupted_and_ends_at_once(tmp_path: pathlib.Path) -> None:
    """A message of it is under way, which the other one never answers: it is alive, and asleep."""
    waiting, asleep = start_ranks(PROGRAM, ["asleep", "1", str(tmp_path)], 2, forked=[1])
    deadline_s = time.monotonic() + 60
    while len(printed_events(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1)
    waiting.send_signal(signal.SIGINT)
    begun_s = time.monotonic()
    (printed,) = end_ranks([waiting], 30)
    assert time.monotonic() - begun_s < 5
    assert waiting.returncode != 0
    assert "KeyboardInterrupt" in printed
    end_ranks([asleep], 30)
    (error,) = [line for line in printed_events(tmp_path) if line["event"] == "error"]
    assert (error["rank"], error["ranks"]) == (1, [0]), error
    assert "rank 0 raised: KeyboardInterrupt" in error["text"]


def test_a_job_that_is_stopped_as_a_whole_goes_on_as_a_whole(tmp_path: pathlib.Path) -> None:
    """As by Ctrl-Z and fg: all ranks were frozen, longer than a single one may be."""
    started = start_ranks(PROGRAM, ["none", "-1", str(tmp_path)], 2, forked=range(2), FDP_LIVENESS_S="1", CALLS="80")
    deadline_s = time.monotonic() + 60
    while len(printed_events(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for process in started:
        process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    for process in started:
        process.send_signal(signal.SIGCONT)
    printed = end_ranks(started, 60)
    assert [process.returncode for process in started] == [0, 0], printed
    assert [line["event"] for line in printed_events(tmp_path)] == ["trains", "trains"], printed
