"""The command that simulates sharded state on many ranks: it runs, and no step is shorter than its bound."""

from __future__ import annotations

import pathlib

from forked import Forked
from samples import ALL_SAMPLES

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
RANKS = ("4", "32") if ALL_SAMPLES else ("4",)


def test_no_step_is_shorter_than_its_bound() -> None:
    done = Forked(BENCHMARKS / "sharded_simulated.py", ("--model", "mlp", "--ranks", *RANKS), {})
    printed, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors
    rows = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    found = [tuple(cell.strip() for cell in row) for row in rows]
    assert [row[:2] for row in found] == [(n, way) for n in RANKS for way in ("whole", "ZeRO-1", "ZeRO-3")]
    for *_, bound, step, ratio in found:
        assert float(step) >= float(bound) > 0, printed
        assert 1 <= float(ratio) < 1.5, printed
