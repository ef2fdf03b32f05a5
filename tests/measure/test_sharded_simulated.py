"""The command that simulates sharded state on many ranks: it runs, and no step is shorter than its bound."""

from __future__ import annotations

import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def test_no_step_is_shorter_than_its_bound() -> None:
    command = [sys.executable, "sharded_simulated.py", "--model", "mlp", "--ranks", "4", "32"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    found = [tuple(cell.strip() for cell in row) for row in rows]
    assert [row[:2] for row in found] == [(n, way) for n in ("4", "32") for way in ("whole", "ZeRO-1", "ZeRO-3")]
    for *_, bound, step, ratio in found:
        assert float(step) >= float(bound) > 0, done.stdout
        assert 1 <= float(ratio) < 1.5, done.stdout
