"""What a save costs the steps that run meanwhile, and how long it takes.

    python benchmarks/checkpoints.py [--gib 1] [--rounds N] [--ranks N]

Ranks on this machine, one thread each, train a small network beside a large replicated leaf. By turns they

- none: save nothing;
- fdp: `CheckpointManager.save(step, state)`, and step on until it is written;
- torch: `torch.distributed.checkpoint.async_save(state)`, likewise, which copies the state in the call;
- blocking: `CheckpointManager.save(step, state, blocking=True)`.

A turn's steps are those that begin while a save is under way; those of "none" are as many as there is time for. Printed
are medians over turns, with quartiles of the ratios to the turn without a save in the same round: of the median step,
of the mean step (a save that halts every tenth step hides from the median), and the seconds of the call and of all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import Place, run_in
from rich.console import Console
from rich.table import Table
from step_time import paired_ratio, turns

import fdp

WAYS = ("none", "fdp", "torch", "blocking")
SECONDS_OF_NONE = 4.0


def training(gib: float) -> tuple[Any, Callable[[Any], Any]]:
    """A state of some size, and what makes a step of it."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(512, 512, generator=generator) * 0.04 for _ in range(6)]
    state = {"table": torch.ones(int(gib * 2**30) // 4), "layers": layers, "count": torch.tensor(0)}
    x = torch.randn(128, 512, generator=generator)

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        def loss_of(layers: Any) -> Any:
            h = x
            for w in layers:
                h = (h @ w).tanh()
            return h.square().mean()

        grads = fdp.grad(loss_of)(state["layers"])
        layers = [w - 0.01 * g for w, g in zip(state["layers"], grads, strict=True)]
        return {"table": state["table"], "layers": layers, "count": state["count"] + 1}

    return state, lambda state: step(state, x)


def _is_over(begun: float) -> bool:
    """Whether what saves nothing has gone on for as long as it should."""
    return time.perf_counter() - begun > SECONDS_OF_NONE


def _is_written(writing: Any) -> bool:
    """Whether a checkpoint of fdp is on disk."""
    return writing is None or bool(writing._done.is_set())


def on_rank(gib: float, rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    """Train by turns; what each turn took, by the way in which it saves."""
    warnings.simplefilter("ignore")
    state, step = training(gib)
    for _ in range(20):
        state = step(state)
    found: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in WAYS} for what in ("median", "mean", "call", "whole")
    }
    beside = dist.new_group(backend="gloo")
    number = 0
    with fdp.CheckpointManager(f"{folder}/fdp", keep=1) as manager:
        for order in turns(WAYS, rounds):
            for way in order:
                number += 1
                for _ in range(5):
                    state = step(state)
                dist.barrier()
                begun = time.perf_counter()
                steps: list[float] = []
                if way == "torch":
                    saving = dcp.async_save(state, checkpoint_id=f"{folder}/torch", process_group=beside)
                    assert isinstance(saving, concurrent.futures.Future)
                    done: Callable[[], bool] = saving.done
                elif way == "none":
                    done = functools.partial(_is_over, begun)
                else:
                    manager.save(number, state, blocking=way == "blocking")
                    done = functools.partial(_is_written, manager._writing)
                call = time.perf_counter() - begun
                while True:
                    # All ranks go on until all are done.
                    over = torch.tensor(int(done()))
                    dist.all_reduce(over, dist.ReduceOp.MIN)
                    if over or way == "blocking":
                        break
                    at = time.perf_counter()
                    state = step(state)
                    steps.append(time.perf_counter() - at)
                whole = time.perf_counter() - begun
                manager.wait_until_finished()
                found["call"][way].append(call)
                found["whole"][way].append(whole)
                found["median"][way].append(statistics.median(steps or [0.0]))
                found["mean"][way].append(statistics.fmean(steps or [0.0]))
    return found


def main() -> None:
    """Measure, and print a row for each way to save."""
    parser = argparse.ArgumentParser(description="What a save costs the steps that run meanwhile.")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks; each has the whole state")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="fdp-checkpoints-")
    try:
        found = run_in(Place(arguments.ranks, "gloo"), on_rank, arguments.gib, arguments.rounds, folder)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = Table(
        title=f"{arguments.ranks} gloo rank(s), a state of {arguments.gib:g} GiB; medians, quartiles in brackets"
    )
    for name in ("save", "call s", "until written s", "step ms", "median step / none", "mean step / none"):
        table.add_column(name, justify="right")
    for way in WAYS:
        row = [way, *(f"{statistics.median(found[what][way]):.2f}" for what in ("call", "whole"))]
        if way == "blocking":
            table.add_row(*row, "-", "-", "-")
            continue
        row.append(f"{statistics.median(found['median'][way]) * 1e3:.1f}")
        for what in ("median", "mean"):
            low, middle, high = paired_ratio(found[what][way], found[what]["none"])
            row.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
