"""All sharded state gathered again for the backward pass, without a memory limit that asks for it."""

from __future__ import annotations

import pytest

from fdp.step import first_call
from fdp.trace import trace_step


def gather_again(patch: pytest.MonkeyPatch) -> None:
    """Let all steps gather again."""
    patch.setattr(first_call, "trace_step", lambda *args: trace_step(*args[:-1], lambda trace: trace(True)))
