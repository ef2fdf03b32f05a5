"""What every refusal has to say, and how.

A message says what happened, names the user's function and each offender by its key path, and ends with the remedy.
Tests write out a message as it might read, with the lines of test files as LINE, and compare its facts: whatever looks
like code. So a sentence may be improved without a change of tests. Whole texts, one of each class, are in
docs/reference/errors.md, whose code prints them.
"""

from __future__ import annotations

import re
from collections import Counter
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


def facts(line: str) -> Counter[str]:
    """What a line says that is no prose: names, key paths, values, shapes, operators, calls, places."""
    words = [word.rstrip(".,;:") for word in line.split()]
    words = [word[1:] if word.startswith("(") and word.count("(") > word.count(")") else word for word in words]
    words = [word[:-1].rstrip(",") if word.count(")") > word.count("(") else word for word in words]
    return Counter(word for word in words if word == "LINE" or re.search(r"[\d_=@'\"()\[\]{}]|\w\.\w", word))


def check_facts(found: str, text: str) -> None:
    """A message has the facts of a text: what happened, offender by offender, and the remedy."""
    said, wanted = found.splitlines(), text.strip("\n").splitlines()
    assert said[-1].startswith("Remedy: "), found
    assert len(said) == len(wanted), f"other offenders than in\n{text}\n\n{found}"
    for line, expected in zip(said, wanted, strict=True):
        assert line.startswith("  ") == expected.startswith("  "), found
        missing = facts(expected) - facts(line)
        assert not missing, f"nothing of {', '.join(missing)} in\n{line}\n\n{found}"


def check(error: type, call: Callable[[], Any], text: str) -> None:
    """A call raises an error of a class, with the facts of a text."""
    kind, found = raised(call)
    check_facts(found, text)
    assert kind is error


def run(step: Callable[..., Any], state: Tree = None, batch: Tree = None, **options: Any) -> Callable[[], Any]:
    """A call of a step, with a state {"w": [2]} and a batch {"x": [4, 2]} unless others are given."""
    state = {"w": torch.ones(2)} if state is None else state
    batch = {"x": torch.ones(4, 2)} if batch is None else batch
    return lambda: fdp.data_parallel(step, **options)(state, batch)
