"""What pages show of packages that fdp does not need runs on two ranks, where those are installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from documents import FENCE

import fdp

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


@needs("torchmetrics")
@needs("torcheval")
def test_the_program_of_the_page_on_metrics_measures_over_both_ranks(tmp_path: pathlib.Path) -> None:
    page = (PAGES / "metrics.md").read_text()
    (program,) = [found[3] for found in FENCE.finditer(page) if "import torchmetrics" in found[3]]
    (tmp_path / "program.py").write_text(program)
    printed = ran(["-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"], tmp_path)
    assert printed.count("accuracy 0.471, confidence 0.576") == 2 and "accuracy 0.471, confidence 0.576" in page, (
        printed
    )


@needs("torchmetrics")
@needs("torcheval")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, which torcheval uses
def test_functions_of_the_page_on_metrics_run_in_a_step_or_are_refused() -> None:
    rows = re.findall(
        r"^\| `(torch\w+(?:\.\w+)*)` \| (.*) \| (.*) \|$", (PAGES / "metrics.md").read_text(), re.MULTILINE
    )
    found = {(row, name): outcome(row, name) for row, *both in rows for text in both for name in calls_in(text)}
    named = {
        (row, name): outcomes for row, *both in rows for outcomes, text in enumerate(both) for name in calls_in(text)
    }
    assert len(rows) == 2 and len(named) == 14
    assert found == {key: ("runs", "refused")[refused] for key, refused in named.items()}


def calls_in(text: str) -> list[str]:
    """The functions in a cell of the table, each with its options."""
    return [name for name in re.findall(r"`([^`]*)`", text) if not name.startswith("torch.")]


def outcome(module: str, call: str) -> str:
    """What becomes of a function of predictions and labels in a step."""
    name, _, options = call.partition("(")
    functions = [importlib.import_module(module + inner) for inner in (".classification", ".regression", ".text", "")
                 if importlib.util.find_spec(module + inner)]  # fmt: skip
    function = next(getattr(each, name) for each in functions if hasattr(each, name))
    given: dict[str, Any] = eval(f"dict({options or ')'}")
    if module.startswith("torchmetrics") and name.startswith("multiclass"):
        given |= {"num_classes": 3, "validate_args": False}
    elif name == "multiclass_confusion_matrix":
        given |= {"num_classes": 3}
    scores, labels = torch.randn(8, 3).softmax(1), torch.arange(8) % 3

    def measure(scores: torch.Tensor, labels: torch.Tensor) -> Any:
        if name == "mean":
            return fdp.per_rank(function(scores))
        if name == "perplexity":
            return fdp.per_rank(function(scores[None], labels[None]))
        plain = "error" in name or name in ("r2_score", "pearson_corrcoef")
        return fdp.per_rank(function(scores[:, 0], labels.float()) if plain else function(scores, labels, **given))

    measure(scores, labels)  # by itself it runs
    try:
        fdp.data_parallel(measure, batch_argnums=(0, 1))(scores, labels)
    except fdp.TraceError:
        return "refused"
    return "runs"


@needs("accelerate")
def test_the_command_of_the_page_on_accelerate_trains_on_two_ranks() -> None:
    (command,) = re.findall(r"^    accelerate launch (.*)$", (PAGES / "accelerate.md").read_text(), re.MULTILINE)
    assert "over all 2 ranks" in ran(["-m", "accelerate.commands.launch", *command.split()], ROOT)
