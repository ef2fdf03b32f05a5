"""What every refusal has to say, and how; whole texts are compared with the lines of test files written LINE.

A message says what happened, names the user's function and each offender by its key path, and ends with the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp

Tree = Any


def check_message(message: str, *parts: str) -> None:
    """The shape every message has, and what this one must name."""
    assert message.splitlines()[-1].startswith("Remedy: "), message
    for part in parts:
        assert part in message, f"no {part!r} in\n{message}"


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    """The class and the text of what a call raises, with line numbers of test files taken out."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, re.sub(r"\btest_\w+\.py:\d+", "LINE", str(caught.value))


def check(error: type, call: Callable[[], Any], text: str) -> None:
    """A call raises an error of a class, with a text."""
    kind, found = raised(call)
    assert found == text.strip("\n")
    assert kind is error
    assert found.splitlines()[-1].startswith("Remedy: ")
    assert all(line.startswith("  ") for line in found.splitlines()[1:-1])


def run(step: Callable[..., Any], state: Tree = None, batch: Tree = None, **options: Any) -> Callable[[], Any]:
    """A call of a step, with a state {"w": [2]} and a batch {"x": [4, 2]} unless others are given."""
    state = {"w": torch.ones(2)} if state is None else state
    batch = {"x": torch.ones(4, 2)} if batch is None else batch
    return lambda: fdp.data_parallel(step, **options)(state, batch)
