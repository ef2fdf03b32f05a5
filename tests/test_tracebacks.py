"""Tracebacks of the user's errors show the user's code, and not what lies between its lines."""

from __future__ import annotations

import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from fdp.step import first_call

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare `raise` of Python 3.10 shows all frames")

HERE = pathlib.Path(__file__)
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


@pytest.mark.parametrize("method", [None, "trace", "plan", "profile"])
@pytest.mark.parametrize("step", [raises, raises_in_a_gradient, misuses_torch, branches])
def test_only_the_users_frames_are_shown(step: Callable[..., Any], method: str | None) -> None:
    made = fdp.data_parallel(step)
    error: BaseException | None = caught(made if method is None else getattr(made, method), W, X)
    assert frames(error)[0] == str(HERE)
    if step is not branches:  # which is refused by fdp, and names the line in its message
        assert sum(file == str(HERE) for file in frames(error)) >= 2, "the step itself is shown"
    while error is not None:
        inside = [file for file in frames(error) if "/fdp/" in file or "/torch/fx/" in file or "_subclasses" in file]
        assert inside == []
        error = error.__cause__ or error.__context__


def test_an_environment_variable_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDP_TRACEBACK_FILTERING", "off")
    found = frames(caught(fdp.data_parallel(raises), W, X))
    assert any("/fdp/" in file for file in found) and any("/torch/fx/" in file for file in found)


def test_a_mistake_of_fdp_shows_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "summarise", None)
    found = frames(caught(fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum())), W, X))
    assert any(file.endswith("first_call.py") for file in found)


def test_dir_lists_what_is_public() -> None:
    assert set(dir(fdp)) == {*fdp.__all__, "__doc__", "__version__"}
