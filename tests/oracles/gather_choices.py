"""All sharded state gathered again for the backward pass, without a memory limit that asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fdp.step import first_call
from fdp.trace import Trace, trace_step


def gather_again(patch: pytest.MonkeyPatch, some: bool = False, first: int | None = None) -> None:
    """Let all steps gather again; if `some`, every other value; or of all values only so many of the first."""

    def choose(trace: Callable[[frozenset[str]], Trace]) -> Trace:
        gathered = [link.whole for link in trace(frozenset()).links if link.kind == "gathered"]
        return trace(frozenset(list(dict.fromkeys(gathered))[: first : 2 if some else 1]))

    patch.setattr(first_call, "trace_step", lambda *args: trace_step(*args[:-1], choose))
