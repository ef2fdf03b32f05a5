"""The way from one stage to the next: `Trace.plan` and `Plan.emit` are methods of values on lower floors.

A stage does not import the one that follows it. Each later stage puts its entry point here when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_entries: dict[str, Callable[..., Any]] = {}


def enters(stage: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the entry point of a stage."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _entries[stage] = function
        return function

    return register


def enter(stage: str, *args: Any) -> Any:
    """Call the entry point of a stage."""
    return _entries[stage](*args)
