"""What the whole suite has no time for: tests and samples that only FDP_ALL_SAMPLES=1 runs.

`make test` is to end within minutes on two cores. What is left out by default repeats, on more ranks, other models or
through the compiler as well, what other tests show.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")

ALL_SAMPLES = bool(os.environ.get("FDP_ALL_SAMPLES"))

exhaustive = pytest.mark.skipif(not ALL_SAMPLES, reason="FDP_ALL_SAMPLES=1 runs it")


def some(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """One of `every` cases by default, the first among them; all with FDP_ALL_SAMPLES=1. For cases that are alike.

    A case that is a tuple is the values of several arguments.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=exhaustive if at % every else ()) for at, each in enumerate(values)]


def few(cases: Mapping[str, T], every: int = 2, first: int = 0) -> dict[str, T]:
    """One of `every` entries by default, from the one of number `first` on; all with FDP_ALL_SAMPLES=1.

    For entries that are compiled as one step.
    """
    return dict(cases if ALL_SAMPLES else list(cases.items())[first::every])


_EXAMPLES = os.environ.get("FDP_EXAMPLES")
"""How many examples a property test tries, and then new ones at each run; by default few, and always the same."""


def examples(count: int, by_default: int | None = None) -> settings:
    """Settings of a property test: FDP_EXAMPLES examples; else `count` with FDP_ALL_SAMPLES=1.

    Args:
        count: of examples.
        by_default: without it; a third if it is not given.
    """
    few = -(-count // 3) if by_default is None else by_default
    return settings(
        max_examples=int(_EXAMPLES or (count if ALL_SAMPLES else few)),
        derandomize=_EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def is_refused(error: Exception) -> bool:
    """Whether an error is a refusal: says what to do, and not that fdp itself went wrong, which is a mistake."""
    remedy = str(error).splitlines()[-1]
    return remedy.startswith("Remedy: ") and "report" not in remedy
