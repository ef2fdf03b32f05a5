"""What it costs to measure accuracy and loss over many batches: sums in the step, or torchmetrics and torcheval.

    pip install torchmetrics torcheval
    python benchmarks/metrics.py [--rounds N] [--batches N]

Two gloo ranks on this machine, one thread each, evaluate one network on the same batches. By turns they do it with:

- sums: a step adds up this rank's sums, and one message adds up the ranks at the end (docs/how-to/metrics.md);
- sums outside: the same sums, added up outside of the step, of what it returns;
- a message a batch: the step returns sums over ranks, which are added up;
- torchmetrics, torcheval: the step returns what they need, and they are updated outside, and computed at the end.

All find the same accuracy and loss, which is checked first. Printed are medians of a pass over all batches, in ms, and
of its ratio to "sums" of the same round, with the quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from command import positive
from figures import machine
from launch import Place, run_in
from rich.console import Console
from rich.table import Table
from step_time import paired_ratio, turns

import fdp

WIDTHS, BATCH = (64, 256, 10), 256
LIBRARIES = ("torchmetrics", "torcheval")

Pass = Callable[[Any, Sequence[Any]], tuple[float, float]]
"""Given parameters and batches, finds accuracy and mean loss over all ranks."""


def logits_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The network: two layers."""
    logits: torch.Tensor = torch.tanh(x @ params["in"]) @ params["out"]
    return logits


def sums_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Right answers, loss and samples of a batch."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([(logits.argmax(1) == labels).sum().double(), loss.double(), loss.new_tensor(len(labels))])


def of_sums(sums: torch.Tensor) -> tuple[float, float]:
    """Accuracy and mean loss."""
    right, loss, count = sums.tolist()
    return right / count, loss / count


def sums() -> Pass:
    """A step that adds up sums of this rank."""

    @fdp.data_parallel(donate_argnums=0)
    def tally(total: Any, params: Any, batch: Any) -> Any:
        return fdp.per_rank(total + sums_of(logits_of(params, batch["x"]), batch["y"]))

    def evaluate(params: Any, batches: Sequence[Any]) -> tuple[float, float]:
        total = fdp.per_rank(torch.zeros(3, dtype=torch.float64))
        for batch in batches:
            total = tally(total, params, batch)
        return of_sums(fdp.psum(total))

    return evaluate


def predicting() -> Callable[[Any, Any], Any]:
    """A step that returns what this rank predicts."""

    @fdp.data_parallel
    def predict(params: Any, batch: Any) -> Any:
        return fdp.per_rank(logits_of(params, batch["x"]))

    return predict


def sums_outside() -> Pass:
    """Sums that are added up outside of the step."""
    predict = predicting()

    def evaluate(params: Any, batches: Sequence[Any]) -> tuple[float, float]:
        total = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            total += sums_of(predict(params, batch), batch["y"])
        return of_sums(fdp.psum(total))

    return evaluate


def a_message_a_batch() -> Pass:
    """A step that adds up each batch over ranks."""

    @fdp.data_parallel
    def measure(params: Any, batch: Any) -> Any:
        return fdp.psum(sums_of(logits_of(params, batch["x"]), batch["y"]))

    def evaluate(params: Any, batches: Sequence[Any]) -> tuple[float, float]:
        total = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            total += measure(params, batch)
        return of_sums(total)

    return evaluate


def with_torchmetrics() -> Pass:
    """Metrics of torchmetrics, without its checks of arguments."""
    from torchmetrics.aggregation import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    predict = predicting()
    accuracy, mean = MulticlassAccuracy(WIDTHS[-1], average="micro", validate_args=False), MeanMetric("disable")

    def evaluate(params: Any, batches: Sequence[Any]) -> tuple[float, float]:
        accuracy.reset()
        mean.reset()
        for batch in batches:
            logits = predict(params, batch)
            accuracy.update(logits, batch["y"])
            mean.update(F.cross_entropy(logits, batch["y"], reduction="none"))
        return float(accuracy.compute()), float(mean.compute())

    return evaluate


def with_torcheval() -> Pass:
    """Metrics of torcheval."""
    from torcheval.metrics import Mean, MulticlassAccuracy
    from torcheval.metrics.toolkit import sync_and_compute_collection

    predict = predicting()
    metrics = {"accuracy": MulticlassAccuracy(), "loss": Mean()}

    def evaluate(params: Any, batches: Sequence[Any]) -> tuple[float, float]:
        for metric in metrics.values():
            metric.reset()
        for batch in batches:
            logits = predict(params, batch)
            metrics["accuracy"].update(logits, batch["y"])
            metrics["loss"].update(F.cross_entropy(logits, batch["y"], reduction="none"))
        found: Any = sync_and_compute_collection(metrics)
        return float(found["accuracy"]), float(found["loss"])

    return evaluate


WAYS: dict[str, Callable[[], Pass]] = {
    "sums": sums,
    "sums outside": sums_outside,
    "a message a batch": a_message_a_batch,
    "torchmetrics": with_torchmetrics,
    "torcheval": with_torcheval,
}


def on_rank(ways: Sequence[str], batches: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each pass over all batches, by way."""
    generator = torch.Generator().manual_seed(0)
    first, second = WIDTHS[0] * WIDTHS[1], WIDTHS[1] * WIDTHS[2]
    drawn = torch.randn(first + second, generator=generator) / 8
    params = {"in": drawn[:first].view(WIDTHS[:2]), "out": drawn[first:].view(WIDTHS[1:])}
    generator.manual_seed(1 + dist.get_rank())
    data = [
        {
            "x": torch.randn(BATCH, WIDTHS[0], generator=generator),
            "y": torch.randint(WIDTHS[-1], (BATCH,), generator=generator),
        }
        for _ in range(batches)
    ]
    passes = {way: WAYS[way]() for way in ways}
    answers = {way: evaluate(params, data) for way, evaluate in passes.items()}
    for answer in answers.values():
        torch.testing.assert_close(answer, answers["sums"], rtol=1e-5, atol=0)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for order in turns(tuple(ways), rounds):
        for way in order:
            dist.barrier()
            begun = time.perf_counter()
            passes[way](params, data)
            found[way].append((time.perf_counter() - begun) * 1e3)
    return found


def main() -> None:
    """Measure, and print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=40, help="passes of each way")
    parser.add_argument("--batches", type=positive, default=40, help="of 256 samples, in a pass on each rank")
    args = parser.parse_args()
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    ways = [way for way in WAYS if way not in missing]
    found = run_in(Place(2, "gloo"), on_rank, ways, args.batches, args.rounds)[0]
    table = Table(title=f"two gloo ranks, rank 0: accuracy and loss over {args.batches} batches of {BATCH}")
    for name in ("way", "a pass (ms)", "beside sums"):
        table.add_column(name, justify="right")
    for way in ways:
        low, middle, high = paired_ratio(found[way], found["sums"])
        table.add_row(way, f"{statistics.median(found[way]):.1f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]")
    for name in missing:
        table.add_row(name, "not measured", "not installed")
    console = Console(width=100)
    console.print(table)
    where = {**machine(), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    console.print(", ".join(f"{key} {value}" for key, value in where.items()))


if __name__ == "__main__":
    main()
