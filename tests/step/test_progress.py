"""A first call says what it is doing: on a terminal as one line, in a log as a line a stage; elsewhere nothing."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from terminals import at_a_terminal

import fdp
from fdp.step import progress

STAGES = ["tracing", "planning", "writing and proving", "comparing"]
TAKEN = r"\(tracing \d+\.\d, planning \d+\.\d, writing and\s+proving \d+\.\d, comparing \d+\.\d, first run \d+\.\d\)"


def double(w: torch.Tensor, x: torch.Tensor) -> Any:
    print("the step prints")
    time.sleep(0.05)
    return w * 2, fdp.pmean(x.sum())


def first_call(**options: Any) -> None:
    step = fdp.data_parallel(double, **options)
    for _ in range(2):
        step(torch.ones(2), torch.ones(3))


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fdp"]


def test_each_stage_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"):
        first_call()
    *stages, ready, again = logged(caplog)
    assert stages == [f"step 'double': {what}" for what in [*STAGES, "first run"]]
    assert re.fullmatch(rf"step 'double' is ready after \d+\.\d s {TAKEN}", ready)
    assert again == "step 'double': comparing again"  # before the second call


@pytest.mark.parametrize("method", ["trace", "plan"])
def test_what_is_done_ahead_is_told_as_well(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"):
        getattr(fdp.data_parallel(double), method)(torch.ones(2), torch.ones(3))
    assert logged(caplog) == [f"step 'double': {what}" for what in STAGES[: 1 if method == "trace" else 2]]


def test_a_compiled_step_says_that_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"):
        fdp.data_parallel(double, compile=True)(torch.ones(2), torch.ones(3))
    stages = [line for line in logged(caplog) if not line.endswith("so far")]  # as a slow compiler makes it say
    assert stages[-4:-1] == [f"step 'double': {what}" for what in ("compiling", "comparing", "first run")]


def test_a_stage_that_takes_long_says_so_in_the_log_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_REDRAWN_S", 0.01)
    monkeypatch.setattr(progress, "_AGAIN_S", 0.05)
    shown = progress.Progress("double")
    with caplog.at_level(logging.INFO, logger="fdp"), shown, shown.stage("compiling"):
        time.sleep(0.5)
    first, *again = logged(caplog)
    assert first == "step 'double': compiling"
    assert again and all(re.fullmatch(r"step 'double': compiling, for \d s so far", line) for line in again)


def test_the_log_tells_in_which_stage_an_error_came(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"), pytest.raises(fdp.TraceError):
        fdp.data_parallel(lambda w, x: w if x.sum() > 0 else -w)(torch.ones(2), torch.ones(3))
    first, last = logged(caplog)
    assert first == "step '<lambda>': tracing"
    assert re.fullmatch(r"step '<lambda>': TraceError while tracing, after \d+\.\d s", last)


def test_a_stage_in_another_one_is_not_part_of_its_seconds() -> None:
    shown = progress.Progress("double")
    with shown, shown.stage("waiting"), shown.stage("compiling"):
        time.sleep(0.3)
    assert shown._seconds["compiling"] > 0.25 and shown._seconds["waiting"] < 0.15


def test_nothing_is_said_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    first_call()
    out, err = capfd.readouterr()
    assert err == "" and set(out.splitlines()) == {"the step prints"}


def test_a_terminal_has_one_line_and_then_what_each_stage_took(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    fdp.data_parallel(double)(torch.ones(2), torch.ones(3))
    assert re.fullmatch(
        rf"(the step prints\n)+fdp: step 'double' is ready after \d+\.\d s {TAKEN}\n", terminal.written()
    )
    drawn = re.findall(r"(fdp: [^\n]*?)\x1b\[(\d+)D\x1b\[0K", terminal.getvalue())
    assert all(len(line) == int(back) < 80 for line, back in drawn), "what was drawn is taken away, and no more"
    for what in [*STAGES, "first run"]:
        assert any(line.startswith(f"fdp: step 'double': {what}, 0 s") for line, _ in drawn)
    assert max(map(len, terminal.written().splitlines())) <= 80


def test_a_long_name_leaves_room_for_stage_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    shown = progress.Progress("a_step_whose_name_says_all_that_it_does_and_is_wider_than_a_line")
    with shown, shown.stage("writing and proving"):
        pass
    assert "…': writing and proving, 0 s" in terminal.getvalue()


def test_the_level_of_the_logger_silences_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    before = progress.LOGGER.level
    progress.LOGGER.setLevel(logging.WARNING)
    try:
        first_call()
    finally:
        progress.LOGGER.setLevel(before)
    assert set(terminal.getvalue().splitlines()) == {"the step prints"}


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_leave_the_terminal_to_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    shown = progress.Progress("double")
    with shown, shown.stage("tracing"):
        pass
    shown.finish()
    assert bool(terminal.getvalue()) == (rank == 0)


def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    asked = []

    def gone(text: str) -> int:
        asked.append(text)
        raise OSError("Input/output error")

    monkeypatch.setattr(terminal, "write", gone)
    shown = progress.Progress("double")
    with shown, shown.stage("tracing"):
        pass
    shown.finish()
    assert asked and terminal.write is gone


def test_an_error_takes_the_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(lambda w, x: w if x.sum() > 0 else -w)(torch.ones(2), torch.ones(3))
    said = terminal.getvalue()
    assert "fdp: step '<lambda>': tracing, 0 s" in said and terminal.written() == ""
    time.sleep(2 * progress._REDRAWN_S)
    assert terminal.getvalue() == said
