"""The ways in which a step with state runs: kept or donated, op by op or compiled."""

from __future__ import annotations

from typing import Any

import pytest
from samples import exhaustive

WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "donated": {"donate_argnums": 0},
    "compiled": {"compile": True},
    "compiled and donated": {"compile": True, "donate_argnums": 0},
}
_REPEATS = {"donated", "compiled"}
"""They differ from the others in one thing alone."""

ways = pytest.mark.parametrize("way", [pytest.param(way, marks=exhaustive if way in _REPEATS else ()) for way in WAYS])
