"""Sharded state beside whole state, DDP, DDP with ZeroRedundancyOptimizer, and FSDP2's fully_shard.

    python benchmarks/sharded.py [--ranks N] [--rounds N] [--mbit N] [--model mlp|gpt] [--only TEXT]
    python benchmarks/sharded.py --state | --peak | --update muon|adafactor

By turns each contender makes one step with AdamW, in the same processes. Printed are the median of rank 0's times,
their quartiles, and the ratio to fdp with whole state. With --mbit ranks are two hosts with a shaped link (needs root,
ip and tc). --state prints what a rank holds of parameters and of AdamW's state for GPT-2 small instead, and takes no
step. --peak prints the most that the allocator has handed out at once during a step of GPT-2 small, for each contender
in processes of its own, and what fdp predicts. --update prints how long the update of the matrices of GPT-2 small takes
if every rank computes all of it, and if state is sharded; its messages are part of that. With --only there are no
contenders but those whose name has a text in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lab import lab_place
from launch import Place, run_in
from models import GPT, perceptron
from rich.console import Console
from rich.table import Table
from step_time import quartiles_of, turns
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fdp

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        model: makes the model.
        batch: makes a rank's batch.
        loss: of an output and a batch.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _next_token(out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


CASES = {
    "mlp": Case(lambda: perceptron(2048, 5), lambda: torch.randn(32, 2048), lambda out, x: (out - x).square().mean()),
    "gpt": Case(lambda: GPT(8192, 256, 8, 8, 128), lambda: torch.randint(0, 8192, (2, 128)), _next_token),
}
GPT2 = Case(lambda: GPT(50257, 768, 12, 12, 1024), lambda: torch.randint(0, 50257, (1, 128)), _next_token)
_ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}


def training(case: Case, way: str) -> tuple[Any, Any]:
    """A step and its state, of which the optimizer's ("opt") or all ("all") is sharded, or none ("")."""
    torch.manual_seed(0)
    apply, params, buffers = fdp.from_module(case.model())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    if way == "all":
        params = fdp.shard(params)
    opt = optimizer.init(params)

    def train_step(state: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: case.loss(apply(p, buffers, batch)[0], batch))(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(loss)

    return train_step, {"params": params, "opt": fdp.shard(opt) if way == "opt" else opt}


def of_fdp(case: Case, way: str, least: bool = False, predicted: list[float] | None = None) -> Run:
    """A step of fdp with whole state (""), with the optimizer's state sharded ("opt"), or with all of it ("all").

    Args:
        case: the model.
        way: where its state lies.
        least: whether it takes the least memory that it can.
        predicted: gets the bytes that it is to hold.
    """
    train_step, *held = training(case, way)
    batch = case.batch()
    step = fdp.data_parallel(train_step, donate_argnums=0)
    if least:
        try:
            fdp.data_parallel(train_step, donate_argnums=0, memory_limit_mb=1).plan(held[0], batch)
        except fdp.ArgumentError as error:
            limit_mb = float(re.findall(r"memory_limit_mb=([\d.]+) is the least", str(error))[0])
        step = fdp.data_parallel(train_step, donate_argnums=0, memory_limit_mb=limit_mb)
    if predicted is not None:
        predicted.append(step.plan(held[0], batch).memory().peak_bytes)

    def run() -> None:
        held[0], _ = step(held[0], batch)

    return run


def of_torch(case: Case, way: str) -> Run:
    """A step of DDP, of DDP with ZeroRedundancyOptimizer ("zero"), or of FSDP2 ("fsdp")."""
    torch.manual_seed(0)
    model: Any = case.model()
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in getattr(model, "blocks", model if isinstance(model, nn.Sequential) else ()):
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    batch = case.batch()

    def run() -> None:
        optimizer.zero_grad()
        case.loss(model(batch), batch).backward()
        optimizer.step()

    return run


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "fdp, whole state": lambda case: of_fdp(case, ""),
    "fdp, ZeRO-1": lambda case: of_fdp(case, "opt"),
    "fdp, ZeRO-3": lambda case: of_fdp(case, "all"),
    "DDP": lambda case: of_torch(case, ""),
    "DDP, ZeroRedundancyOptimizer": lambda case: of_torch(case, "zero"),
    "FSDP2, fully_shard": lambda case: of_torch(case, "fsdp"),
}


def on_rank(name: str, rounds: int, only: str) -> dict[str, list[float] | str]:
    """Make steps by turns; seconds of each, or why there are none."""
    warnings.simplefilter("ignore")
    found: dict[str, list[float] | str] = {}
    runs: dict[str, Run] = {}
    for contender, start in CONTENDERS.items():
        if only not in contender:
            continue
        try:
            run = start(CASES[name])
            for _ in range(3):
                run()
            runs[contender], found[contender] = run, []
        except Exception as error:
            found[contender] = f"{type(error).__name__}: {error}".splitlines()[0]
    for order in turns(tuple(runs), rounds):
        for contender in order:
            torch.distributed.barrier()
            begun = time.perf_counter()
            runs[contender]()
            seconds = found[contender]
            assert isinstance(seconds, list)
            seconds.append(time.perf_counter() - begun)
    return found


LEAST = "fdp, ZeRO-3, the least memory"


def peak_on_rank(contender: str) -> tuple[int, float]:
    """The most bytes that the allocator has handed out at once during the third step; and what fdp predicted."""
    warnings.simplefilter("ignore")
    predicted: list[float] = []
    ways = {"fdp, whole state": "", "fdp, ZeRO-1": "opt", "fdp, ZeRO-3": "all", LEAST: "all"}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        if contender in ways:
            run = of_fdp(GPT2, ways[contender], contender == LEAST, predicted)
        else:
            run = CONTENDERS[contender](GPT2)
        for _ in range(2):
            run()
        gc.collect()
        begun_ns = time.time_ns()
        run()
    now = most = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        if event.start_ns() >= begun_ns:
            most = max(most, now)
    return most, next(iter(predicted), 0.0)


UPDATES: dict[str, type[torch.optim.Optimizer]] = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}
_WAYS = {"every rank computes all": "", "fdp, ZeRO-1": "opt", "fdp, ZeRO-3": "all"}


def updates_on_rank(name: str, rounds: int) -> dict[str, list[float] | str]:
    """Update the matrices of the blocks of GPT-2 small by turns; seconds of each."""
    torch.manual_seed(0)
    found = fdp.from_module(GPT2.model())[1]
    params = {key: p.detach() for key, p in found.items() if "blocks" in key and p.dim() == 2}
    grads = fdp.pytree.map_leaves(torch.randn_like, params)
    optimizer = fdp.optim.from_torch(UPDATES[name], lr=1e-3)

    @fdp.data_parallel(donate_argnums=0, batch_argnums=())
    def update(state: Any) -> Any:
        new, opt = optimizer.update(state["grads"], state["opt"], state["params"])
        return {"params": new, "opt": opt, "grads": state["grads"]}

    states = {}
    for contender, way in _WAYS.items():
        placed = fdp.pytree.map_leaves(torch.clone, params)
        opt, given = optimizer.init(placed), grads
        if way:
            opt, given = fdp.shard(opt), fdp.shard(grads)
        states[contender] = {"params": fdp.shard(placed) if way == "all" else placed, "opt": opt, "grads": given}
    measured: dict[str, list[float] | str] = {contender: list[float]() for contender in _WAYS}
    for turn, order in enumerate(turns(tuple(_WAYS), rounds + 2)):
        for contender in order:
            torch.distributed.barrier()
            begun = time.perf_counter()
            states[contender] = update(states[contender])
            seconds = measured[contender]
            assert isinstance(seconds, list)
            if turn >= 2:  # the first ones also make programs, and warm up
                seconds.append(time.perf_counter() - begun)
    return measured


def print_peak(place: Place, ranks: int, only: str) -> None:
    """Print what a rank holds while a step runs, of contenders whose name has a text in it."""
    table = Table(title=f"GPT-2 small, AdamW, float32, one sequence of 128, {ranks} ranks: MiB at most, on rank 0")
    for column in ("contender", "measured", "predicted"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for contender in (name for name in (*CONTENDERS, LEAST) if only in name):
        try:
            most, predicted = run_in(place, peak_on_rank, contender)[0]
        except Exception as error:
            table.add_row(contender, f"{type(error).__name__}"[:30], "")
            continue
        table.add_row(contender, f"{most / 2**20:.0f}", f"{predicted / 2**20:.0f}" if predicted else "")
    Console().print(table)


def held_by_rank() -> dict[str, tuple[int, int]]:
    """Bytes of parameters and of AdamW's state that this rank holds, of GPT-2 small, by way."""
    with torch.no_grad():
        params = fdp.from_module(GPT(50257, 768, 12, 12, 1024))[1]
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    found = {}
    for way in ("whole", "ZeRO-1", "ZeRO-3"):
        placed = fdp.shard(params) if way == "ZeRO-3" else params
        opt = optimizer.init(placed)
        found[way] = _bytes(placed), _bytes(fdp.shard(opt) if way == "ZeRO-1" else opt)
        del opt, placed
    return found


def _bytes(tree: Any) -> int:
    leaves = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in fdp.pytree.leaves_of(tree)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def print_state(place: Place, ranks: int) -> None:
    """Print what a rank holds."""
    table = Table(title=f"GPT-2 small, AdamW, float32, {ranks} ranks: MiB a rank")
    for column in ("state", "parameters", "optimizer", "sum", "of the bound"):
        table.add_column(column, justify="left" if column == "state" else "right")
    by_rank = run_in(place, held_by_rank)
    params, opt = by_rank[0]["whole"]
    bounds = {"whole": params + opt, "ZeRO-1": params + opt / ranks, "ZeRO-3": (params + opt) / ranks}
    for way, bound in bounds.items():
        most = max((each[way] for each in by_rank), key=sum)
        mib = [f"{value / 2**20:.1f}" for value in (*most, sum(most))]
        table.add_row(way, *mib, f"{sum(most) / bound:.4f}")
    Console().print(table)


def main() -> None:
    """Measure, and print a row for each contender."""
    parser = argparse.ArgumentParser(description="Sharded state beside whole state, DDP and FSDP2.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--mbit", type=float, default=0.0, help="megabits a second of each link; 0 for one machine")
    parser.add_argument("--model", choices=tuple(CASES), default="mlp")
    parser.add_argument("--state", action="store_true", help="what a rank holds, in place of times")
    parser.add_argument("--peak", action="store_true", help="what a rank holds in a step, in place of times")
    parser.add_argument("--update", choices=tuple(UPDATES), help="of the update alone, in place of steps")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    arguments = parser.parse_args()
    if not any(arguments.only in name for name in (*CONTENDERS, LEAST)):
        parser.error(f"no contender has {arguments.only!r} in its name")
    place = lab_place(arguments.mbit * 1e6) if arguments.mbit else Place(arguments.ranks, "gloo")
    if (missing := place.why_not()) is not None:
        parser.exit(1, f"{missing}\n")
    if arguments.state:
        print_state(place, arguments.ranks)
        return
    if arguments.peak:
        print_peak(place, arguments.ranks, arguments.only)
        return
    where = f"two hosts, {arguments.mbit:g} Mbit/s" if arguments.mbit else f"{arguments.ranks} ranks on one machine"
    if arguments.update:
        title = f"Update of the matrices of GPT-2 small, {arguments.update}, {where}, gloo: ms"
        with place.opened():
            print_times(title, run_in(place, updates_on_rank, arguments.update, arguments.rounds)[0])
        return
    title = f"{arguments.model}, AdamW, {where}, gloo: ms a step"
    with place.opened():
        print_times(title, run_in(place, on_rank, arguments.model, arguments.rounds, arguments.only)[0])


def print_times(title: str, measured: dict[str, list[float] | str]) -> None:
    """Print medians and quartiles, and ratios to the first contender that ran."""
    table = Table(title=title)
    for column in ("contender", "median", "quartiles", "beside the first"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    first = next((seconds for seconds in measured.values() if not isinstance(seconds, str)), [])
    for name, seconds in measured.items():
        if isinstance(seconds, str):
            table.add_row(name, "", "", seconds[:60])
            continue
        low, middle, high = quartiles_of(seconds)
        pairs = [one / two for one, two in zip(seconds, first, strict=True)]
        table.add_row(
            name, f"{middle * 1e3:.0f}", f"{low * 1e3:.0f} to {high * 1e3:.0f}", f"{statistics.median(pairs):.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
