"""The ways in which a step with state runs: kept or donated, op by op or compiled."""

from __future__ import annotations

from typing import Any

import pytest

WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "donated": {"donate_argnums": 0},
    "compiled": {"compile": True},
    "compiled and donated": {"compile": True, "donate_argnums": 0},
}
ways = pytest.mark.parametrize("way", WAYS)
