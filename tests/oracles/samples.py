"""What the whole suite has no time for: tests and samples that only FDP_ALL_SAMPLES=1 runs.

`make test` is to end within minutes on two cores. What is left out by default repeats, on more ranks, other models or
through the compiler as well, what other tests show.
"""

from __future__ import annotations

import os

import pytest

ALL_SAMPLES = bool(os.environ.get("FDP_ALL_SAMPLES"))

exhaustive = pytest.mark.skipif(not ALL_SAMPLES, reason="FDP_ALL_SAMPLES=1 runs it")


def is_refused(error: Exception) -> bool:
    """Whether an error is a refusal: says what to do, and not that fdp itself went wrong, which is a mistake."""
    remedy = str(error).splitlines()[-1]
    return remedy.startswith("Remedy: ") and "report" not in remedy
