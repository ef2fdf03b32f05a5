"""What the pages on Ray and Accelerate show runs on two ranks, where those are installed."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from documents import FENCE

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def ran(command: list[str], folder: pathlib.Path) -> str:
    """What a command printed, in an environment that finds what this one does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@needs("ray")
def test_the_program_of_the_page_on_ray_trains_on_two_workers(tmp_path: pathlib.Path) -> None:
    page = (PAGES / "ray.md").read_text()
    (program,) = [found[3] for found in FENCE.finditer(page) if "TorchTrainer" in found[3]]
    (tmp_path / "program.py").write_text(program)
    metrics = re.search(r"\{'loss': ([\d.e-]+), 'ranks': (\d+)\}", ran(["program.py"], tmp_path))
    assert metrics is not None and metrics[2] == "2" and float(metrics[1]) < 0.2  # of zeros the loss is 1


@needs("accelerate")
def test_the_command_of_the_page_on_accelerate_trains_on_two_ranks() -> None:
    (command,) = re.findall(r"^    accelerate launch (.*)$", (PAGES / "accelerate.md").read_text(), re.MULTILINE)
    assert "over all 2 ranks" in ran(["-m", "accelerate.commands.launch", *command.split()], ROOT)
