"""A first call that takes long says what it is doing on a terminal; a log has a line a stage; others see nothing."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdp
from fdp.step import progress

STAGES = ["tracing", "planning", "writing", "checking"]


class Terminal(io.StringIO):
    """What a person sees: what is written to stdout and to stderr."""

    def isatty(self) -> bool:
        return True


def double(w: torch.Tensor, x: torch.Tensor) -> Any:
    print("the step prints")
    time.sleep(0.05)
    return w * 2, fdp.pmean(x.sum())


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From here on (pytest puts its own streams in place before each test)."""
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(sys, "stdout", out)
    return out


def first_call(**options: Any) -> None:
    step = fdp.data_parallel(double, **options)
    for _ in range(2):
        step(torch.ones(2), torch.ones(3))


def lines_of(terminal: Terminal) -> list[str]:
    return terminal.getvalue().splitlines()


def test_each_stage_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"):
        first_call()
    *stages, last = [record.getMessage() for record in caplog.records if record.name == "fdp"]
    assert stages == [f"step 'double': {what}" for what in STAGES]
    took = r" \d+\.\d, ".join(STAGES) + r" \d+\.\d"
    assert re.fullmatch(rf"step 'double' is ready after \d+\.\d s \({took}\)", last)


def test_a_compiled_step_says_that_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fdp"):
        first_call(compile=True)
    stages = [record.getMessage() for record in caplog.records if record.name == "fdp"][:-1]
    assert stages[-2:] == ["step 'double': compiling", "step 'double': checking"]


def test_nothing_is_said_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    first_call()
    out, err = capfd.readouterr()
    assert err == "" and set(out.splitlines()) == {"the step prints"}


def test_a_quick_first_call_leaves_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    first_call()
    assert set(lines_of(terminal)) == {"the step prints"}


def test_a_long_first_call_says_so_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(progress, "_AGAIN_S", 0.02)
    first_call()
    told = [line for line in lines_of(terminal) if line != "the step prints"]
    *stages, last = told
    assert "fdp: tracing step 'double', for 0.01 s so far" in stages
    assert "fdp: tracing step 'double', for 0.03 s so far" in stages
    assert re.match(r"fdp: step 'double' is ready after \d+\.\d s \(tracing \d+\.\d, ", last)
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue(), "nothing is erased"


def test_the_level_of_the_logger_silences_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    before = progress.LOGGER.level
    progress.LOGGER.setLevel(logging.WARNING)
    try:
        first_call()
    finally:
        progress.LOGGER.setLevel(before)
    assert set(lines_of(terminal)) == {"the step prints"}


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_leave_the_terminal_to_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    shown = progress.Progress("double")
    with shown.stage("tracing"):
        time.sleep(0.1)
    shown.finish()
    assert bool(terminal.getvalue()) == (rank == 0)


def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)

    def gone(text: str) -> int:
        raise OSError("Input/output error")

    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    shown = progress.Progress("double")
    monkeypatch.setattr(terminal, "write", gone)
    with shown.stage("tracing"):
        time.sleep(0.05)
    shown.finish()


def test_an_error_ends_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)

    def branches(w: torch.Tensor, x: torch.Tensor) -> Any:
        time.sleep(0.1)
        return w if x.sum() > 0 else -w

    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(progress, "_AGAIN_S", 0.01)
    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(branches)(torch.ones(2), torch.ones(3))
    time.sleep(0.05)
    said = terminal.getvalue()
    assert "tracing step 'branches'" in said and "is ready" not in said
    time.sleep(0.1)
    assert terminal.getvalue() == said
