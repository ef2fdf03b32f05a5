"""Tracebacks of the user's errors show the user's code, and not what lies between its lines."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from fdp.step import first_call

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare `raise` of Python 3.10 shows all frames")

HERE = str(pathlib.Path(__file__))
PACKAGE = str(pathlib.Path(fdp.__file__).parent) + os.sep
TRACER = str(pathlib.Path(torch.__file__).parent / "fx") + os.sep
W, X = torch.ones(2, 2), torch.ones(3, 2)


def helper(w: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


def raises(w: torch.Tensor, x: torch.Tensor) -> Any:
    return helper(w)


def raises_in_a_gradient(w: torch.Tensor, x: torch.Tensor) -> Any:
    return fdp.grad(lambda w: helper(w).sum())(w)


def misuses_torch(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.nn.functional.linear(x, w[0, :1].expand(5, 7))


def branches(w: torch.Tensor, x: torch.Tensor) -> Any:
    return w if x.sum() > 0 else -w


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def caught(step: Callable[..., Any], *args: Any) -> BaseException:
    try:
        step(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def between(error: BaseException) -> set[str]:
    """The files of the frames between the first and the last that are this file's."""
    found = frames(error)
    mine = [at for at, file in enumerate(found) if file == HERE]
    return set(found[mine[0] : mine[-1] + 1]) if mine else set()


@pytest.mark.parametrize("method", ["trace", "plan", "profile"])
@pytest.mark.parametrize("step", [raises, raises_in_a_gradient])
def test_nothing_lies_between_the_users_frames(step: Callable[..., Any], method: str) -> None:
    error = caught(getattr(fdp.data_parallel(step), method), W, X)
    assert between(error) == {HERE} and frames(error).count(HERE) >= 3


@pytest.mark.parametrize("step", [raises, raises_in_a_gradient, misuses_torch, branches])
def test_a_call_shows_no_frame_of_fdp_or_of_the_tracer(step: Callable[..., Any]) -> None:
    error: BaseException | None = caught(fdp.data_parallel(step), W, X)
    assert frames(error)[0] == HERE
    if step is not branches:  # which is refused by fdp, and names the line in its message
        assert frames(error).count(HERE) >= 2, "the step itself is shown"
    while error is not None:
        assert [file for file in frames(error) if file.startswith((PACKAGE, TRACER)) or file == "<string>"] == []
        error = error.__cause__ or error.__context__


def test_an_environment_variable_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDP_TRACEBACK_FILTERING", "off")
    found = frames(caught(fdp.data_parallel(raises), W, X))
    assert any(file.startswith(PACKAGE) for file in found) and any(file.startswith(TRACER) for file in found)


@pytest.mark.parametrize("mistake", [None, lambda flat: json.loads("{")], ids=["in fdp", "in the standard library"])
def test_a_mistake_of_fdp_shows_where_it_was_made(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake is not None:
        # As if it stood in fdp.
        mistake = type(mistake)(mistake.__code__.replace(co_filename=first_call.__file__), mistake.__globals__)
    monkeypatch.setattr(first_call, "summarise", mistake)
    found = frames(caught(fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum())), W, X))
    assert first_call.__file__ in found


@pytest.mark.parametrize("beside", [PACKAGE, TRACER])
def test_a_folder_whose_name_begins_alike_is_the_users(beside: str) -> None:
    mine: dict[str, Any] = {}
    file = beside.rstrip(os.sep) + "_experiments" + os.sep + "mine.py"
    exec(compile("def helper(w):\n    raise ValueError('mine')\n", file, "exec"), mine)
    assert file in frames(caught(fdp.data_parallel(lambda w, x: mine["helper"](w)), W, X))


def test_the_lines_of_a_program_that_has_no_file_are_shown() -> None:
    program = "import torch, fdp\ndef step(w):\n    raise ValueError('mine')\nfdp.data_parallel(step)(torch.ones(2))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert 'File "<string>", line 3, in step' in done.stderr and 'File "<string>", line 4, in <module>' in done.stderr
    assert PACKAGE not in done.stderr


def test_dir_lists_what_is_public() -> None:
    assert set(dir(fdp)) == {*fdp.__all__, "__doc__", "__version__"}
