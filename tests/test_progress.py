"""A first call says what it is doing: one line on a terminal, a line a stage in a log, nothing if nobody asked."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
import torch
from graphs import fake_group
from rich.console import Console

import fdp
from fdp.distributed.group import resolve_group
from fdp.step import progress

STAGES = ["tracing", "planning", "writing", "checking"]


def double(w: torch.Tensor, x: torch.Tensor) -> Any:
    print("the step prints")
    return w * 2, fdp.pmean(x.sum())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a person at a terminal sees."""
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=True, width=80))
    return out


def first_call(**options: Any) -> None:
    step = fdp.data_parallel(double, **options)
    for _ in range(2):
        step(torch.ones(2), torch.ones(3))


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


def test_nothing_is_said_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    first_call()
    out, err = capfd.readouterr()
    assert err == "" and set(out.splitlines()) == {"the step prints"}


def test_a_terminal_shows_one_line_that_goes_away(terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    first_call()
    text = terminal.getvalue()
    assert "tracing step 'double'" in text or "checking step 'double'" in text
    last = " ".join(text[text.index("fdp: step") :].split())
    assert re.search(r"fdp: step 'double' is ready after \d+\.\d s \(tracing \d+\.\d, ", last)
    assert text.count("is ready after") == 1, "the second call has nothing to say"
    assert "the step prints" in capsys.readouterr().out, "what the step prints goes where it went"


def test_the_level_of_the_logger_silences_a_terminal(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.LOGGER, "level", logging.WARNING)
    first_call()
    assert terminal.getvalue() == ""


def test_other_ranks_leave_the_terminal_to_rank_0(terminal: io.StringIO) -> None:
    group = fake_group(2)
    other = type(resolve_group(group))(resolve_group(group).reference, 2, 1)
    with progress.Progress("double", other).shown() as shown, shown.stage("tracing"):
        pass
    assert terminal.getvalue() == ""


def test_an_error_leaves_the_terminal_as_it_was(terminal: io.StringIO) -> None:
    def branches(w: torch.Tensor, x: torch.Tensor) -> Any:
        return w if x.sum() > 0 else -w

    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(branches)(torch.ones(2), torch.ones(3))
    assert "is ready" not in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h"), "the cursor is back"
