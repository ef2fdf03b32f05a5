"""Choices of what is gathered again for the backward pass, without a memory limit that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fdp.step import first_call
from fdp.trace import trace_step


def gathered_again(every: int) -> Callable[..., Any]:
    """A choice: every value is gathered again, or every second one."""

    def choose(trace: Any) -> Any:
        names = [link.whole for link in trace(frozenset()).links if link.kind == "gathered"]
        return trace(frozenset(names[::every]))

    return choose


def gather_again(patch: pytest.MonkeyPatch, every: int = 1) -> None:
    """Let all steps make this choice."""
    patch.setattr(first_call, "trace_step", lambda *args: trace_step(*args[:-1], gathered_again(every)))
