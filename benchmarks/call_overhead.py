"""What a call of a step costs before its first operator: flattening, signature, donation checks.

    python benchmarks/call_overhead.py [--calls 300] [--cold]

Timed is `step(state, batch)` with the run of the emitted program replaced by nothing: all that happens from the call
until the program has its tensors. Each row is one number of leaves; contenders take turns, ten calls each, and
`optree.tree_flatten`, alone on the same arguments, is among them as the measure of what a mere look at the tree costs.
The state is shaped like that of a model with AdamW (`params`, and three tensors for each in `opt`), or a flat list.

- returned: the state is the one that the step returned last, donated; the batch is new.
- fresh: the state's tensors are others at every call, donated, or not.
- alternating: batches of two sizes take turns, so two signatures do; the state is donated and comes back.
- tied: two leaves of the donated state share memory.

Each leaf is an object, its tensor and its storage, so with thousands of them the time depends on whether they are in
the processor's caches: they are from one call to the next here, and are not with `--cold`, as after a step that moved
much memory.

Printed are medians in microseconds with the quartiles of each, and the line a + b * leaves through the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import optree
import torch
from rich.console import Console
from rich.table import Table
from step_time import quartiles_of

import fdp
from fdp.runtime import Emitted

SIZES = (10, 100, 400, 1600)
SHAPE = (2, 2)
BLOCK = 10

Tree = Any


def nested_state(leaves: int) -> Tree:
    """A state of about so many leaves, named and nested like a model's with AdamW."""
    names = [f"layers.{i}.weight" for i in range(max(1, leaves // 4))]
    return {
        "params": {name: torch.zeros(SHAPE) for name in names},
        "buffers": {},
        "opt": {
            "lr": torch.zeros(()),
            "state": {
                name: {"exp_avg": torch.zeros(SHAPE), "exp_avg_sq": torch.zeros(SHAPE), "step": torch.zeros(())}
                for name in names
            },
        },
    }


def flat_state(leaves: int) -> Tree:
    """A list of so many tensors."""
    return [torch.zeros(SHAPE) for _ in range(leaves)]


def tied(state: Tree) -> Tree:
    """The same state with two leaves in the same memory."""
    leaves, spec = optree.tree_flatten(state)
    leaves[1] = leaves[0].view(leaves[0].shape)
    return optree.tree_unflatten(spec, leaves)


def unchanged(state: Tree, batch: Tree) -> Tree:
    """The smallest step: returns its state, and one number."""
    return state, fdp.pmean(batch["x"].mean())


def contenders(make: Callable[[int], Tree], leaves: int) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """What is timed: a function of the round that prepares a call outside of the time, for each name."""

    def calls(donate: Any, states: list[Tree], widths: tuple[int, ...] = (4,)) -> Callable[[int], Callable[[], Any]]:
        step = fdp.data_parallel(unchanged, donate_argnums=donate, check_trace=False)
        for width in widths:
            step(states[0], {"x": torch.zeros(width)})

        def prepare(turn: int) -> Callable[[], Any]:
            state = states[turn % len(states)]
            batch = {"x": torch.zeros(widths[turn % len(widths)])}
            return lambda: step(state, batch)

        return prepare

    many = [make(leaves) for _ in range(2)]
    arguments = (many[0], {"x": torch.zeros(4)})
    return {
        "tree_flatten": lambda turn: lambda: optree.tree_flatten(arguments),
        "returned": calls(0, many[:1]),
        "fresh, donated": calls(0, many),
        "fresh": calls((), many),
        "alternating": calls(0, many[:1], (4, 8)),
        "tied": calls(0, [tied(many[0])]),
    }


@contextlib.contextmanager
def programs_do_nothing() -> Iterator[None]:
    """Replace the run of every emitted program by nothing."""
    with mock.patch.object(Emitted, "run", lambda self, tensors: None):
        yield


def measure(
    make: Callable[[int], Tree], leaves: int, calls: int, cold: torch.Tensor | None
) -> tuple[int, dict[str, list[float]]]:
    """Time every contender `calls` times, interleaved; returns the exact number of leaves, and microseconds.

    `cold` is memory that is written before every call, to drive everything else out of the processor's caches.
    """
    # What the calls are prepared with runs for real: it traces.
    rows = contenders(make, leaves)
    count = len(optree.tree_leaves(make(leaves))) + 1
    times: dict[str, list[float]] = {name: [] for name in rows}
    with programs_do_nothing():
        gc.collect()
        gc.disable()
        for block in range(1 + -(-calls // BLOCK)):
            for name, prepare in rows.items():
                for turn in range(BLOCK):
                    call = prepare(turn)
                    if cold is not None:
                        cold.add_(1)
                    start = time.perf_counter()
                    call()
                    if block:
                        times[name].append((time.perf_counter() - start) * 1e6)
        gc.enable()
    return count, times


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """The line a + b * leaves through (leaves, microseconds), by least squares of relative errors."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True))
    slope /= sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return y_mean - slope * x_mean, slope


def main() -> None:
    """Measure, and print one table for each shape of state."""
    parser = argparse.ArgumentParser(description="What a call costs before its first operator.")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each contender")
    parser.add_argument("--cold", action="store_true", help="drive everything out of the caches before each call")
    arguments = parser.parse_args()
    cold = torch.zeros(2**25) if arguments.cold else None
    torch.set_num_threads(1)
    console = Console()
    for kind, make in (("named leaves, nested", nested_state), ("a flat list", flat_state)):
        table = Table(title=f"{kind}: microseconds from the call to the first operator, median [quartiles]")
        points: dict[str, list[tuple[int, float]]] = {}
        for size in SIZES:
            count, times = measure(make, size, arguments.calls, cold)
            if not table.columns:
                for name in ("leaves", *times):
                    table.add_column(name, justify="right")
            cells = []
            for name, values in times.items():
                low, median, high = quartiles_of(values)
                points.setdefault(name, []).append((count, median))
                cells.append(f"{median:.0f} [{low:.0f}, {high:.0f}]")
            table.add_row(str(count), *cells)
        fits = [f"{a:.1f} + {b:.3f} n" for a, b in map(line, points.values())]
        table.add_section()
        table.add_row("a + b n", *fits)
        console.print(table)


if __name__ == "__main__":
    main()
