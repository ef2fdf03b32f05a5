"""How long it takes to trace, plan and emit a GPT-2-sized training step, and the memory of it, at several depths.

    python benchmarks/tracing.py [--layers N ...] [--threads N ...] [--rows N] [--length N] [--rounds N] [--json FILE]

The step: GPT-2's width (768, 12 heads) and vocabulary (50257), output layer tied, cross entropy, gradients, fused AdamW
through fdp.optim.from_torch, donated state; 12 layers are GPT-2 small. The peer is the same step of the same model in
plain PyTorch, on as many threads.

- ratio: the time of trace, plan and emit over that of the eager steps right before and right after it, two steps in
  all (median over rounds, least and most);
- first: trace, plan and emit in a process that has traced nothing yet;
- first call: all that a user waits for at the first call: trace, plan, emit, check, and the step itself;
- peak: the peak of the resident set while a step is planned and emitted for the first time (VmHWM, reset through
  /proc/self/clear_refs; Linux only), above what the process held before the state was built, over the bytes of the
  state.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from models import GPT
from rich import box
from rich.console import Console
from rich.table import Table

import fdp

WIDTH, HEADS, VOCABULARY = 768, 12, 50257
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
RATIO_TARGET, SECONDS_TARGET, PEAK_TARGET = 1.5, 20.0, 1.2
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        layers: blocks of the model.
        threads: of torch, for both sides.
        rows: sequences in the batch.
        length: tokens in a sequence.
        rounds: how often everything but the first trace is timed.
    """

    layers: int
    threads: int
    rows: int
    length: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of one setting.

    Attributes:
        parameters: their number.
        nodes: of the traced graph.
        first_s: seconds of the first trace, plan and emit of the process.
        trace_s: seconds of each later trace.
        plan_s: seconds of each later plan.
        emit_s: seconds of each later emission.
        eager_s: seconds of each eager step; one more than traces, which lie between them.
        first_call_s: seconds of the first call of a new step.
        peak: peak memory of the first plan and emission over the state; None where there is no /proc.
    """

    parameters: int
    nodes: int
    first_s: float
    trace_s: list[float]
    plan_s: list[float]
    emit_s: list[float]
    eager_s: list[float]
    first_call_s: float
    peak: float | None

    @property
    def ratios(self) -> list[float]:
        """Trace, plan and emit over two eager steps, round by round."""
        ours = map(sum, zip(self.trace_s, self.plan_s, self.emit_s, strict=True))
        theirs = map(sum, zip(self.eager_s[:-1], self.eager_s[1:], strict=True))
        return [a / b for a, b in zip(ours, theirs, strict=True)]


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _settle() -> None:
    """Collect garbage, and give what is free back to the system, so that it is in no later figure."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _model(setting: Setting) -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(VOCABULARY, WIDTH, HEADS, setting.layers, setting.length)


def _batch(setting: Setting) -> Batch:
    ids = torch.randint(VOCABULARY, (setting.rows, setting.length + 1))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def _loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def _eager(setting: Setting, batch: Batch) -> Callable[[], None]:
    model = _model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(batch["x"]), batch).backward()
        optimizer.step()

    return step


def _functional(model: torch.nn.Module) -> tuple[Callable[[], fdp.Step[..., Any]], Any]:
    """A maker of new, untraced steps, and the state."""
    apply, params, buffers = fdp.from_module(model)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **ADAMW)

    def train_step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return _loss(apply(params, state["buffers"], batch["x"])[0], batch)

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": state["buffers"], "opt": opt}, fdp.pmean(loss)

    state = {"params": params, "buffers": buffers, "opt": optimizer.init(params)}
    return lambda: fdp.data_parallel(train_step, donate_argnums=0), state


def measure(setting: Setting) -> Figures:
    """Take all figures of one setting, in this process, which should be new."""
    torch.set_num_threads(setting.threads)
    measurable = _CLEAR_REFS.exists()
    _settle()
    before = _status_bytes("VmRSS") if measurable else 0
    make, state = _functional(_model(setting))
    batch = _batch(setting)
    state_bytes = sum(leaf.nbytes for leaf in optree.tree_leaves(state))
    _settle()
    if measurable:
        _CLEAR_REFS.write_text("5")
    first_s, emitted = _timed(lambda: make().plan(state, batch).emit())
    peak = (_status_bytes("VmHWM") - before) / state_bytes if measurable else None
    nodes = len(emitted.plan.trace.graph.graph.nodes)
    del emitted

    eager = _eager(setting, batch)
    eager()  # makes the optimizer's state
    traces, plans, emissions = [], [], []
    eager_s = [_timed(eager)[0]]
    for _ in range(setting.rounds):
        trace_s, trace = _timed(lambda: make().trace(state, batch))
        plan_s, plan = _timed(trace.plan)
        emit_s, _ = _timed(plan.emit)
        del trace, plan
        traces.append(trace_s)
        plans.append(plan_s)
        emissions.append(emit_s)
        eager_s.append(_timed(eager)[0])
    del eager
    _settle()
    first_call_s, _ = _timed(lambda: make()(state, batch))
    return Figures(
        parameters=sum(leaf.numel() for leaf in optree.tree_leaves(state["params"])),
        nodes=nodes,
        first_s=first_s,
        trace_s=traces,
        plan_s=plans,
        emit_s=emissions,
        eager_s=eager_s,
        first_call_s=first_call_s,
        peak=peak,
    )


def table(figures: dict[Setting, Figures]) -> Table:
    """A row a setting."""
    out = Table(
        "threads", "layers", "parameters", "nodes", "first, s", "trace, s", "plan, s", "emit, s", "ms a node",
        "eager step, s", "ratio", "first call, s", "peak of state",
        box=box.MARKDOWN,
    )  # fmt: skip
    for setting, row in figures.items():
        middle = [statistics.median(times) for times in (row.trace_s, row.plan_s, row.emit_s)]
        ratios = row.ratios
        out.add_row(
            str(setting.threads), str(setting.layers), f"{row.parameters / 1e6:.0f}M", str(row.nodes),
            f"{row.first_s:.2f}", *(f"{seconds:.2f}" for seconds in middle), f"{1e3 * sum(middle) / row.nodes:.2f}",
            f"{statistics.median(row.eager_s):.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})", f"{row.first_call_s:.2f}",
            "not measured" if row.peak is None else f"{row.peak:.2f}",
        )  # fmt: skip
    return out


def verdicts(figures: dict[Setting, Figures]) -> list[str]:
    """The targets, each beside the worst figure that was measured for it."""
    rows = figures.values()
    worst = [
        ("ratio to two eager steps", max(statistics.median(row.ratios) for row in rows), RATIO_TARGET),
        ("seconds for the first trace, plan and emit", max(row.first_s for row in rows), SECONDS_TARGET),
    ]
    peaks = [row.peak for row in rows if row.peak is not None]
    if peaks:
        worst.append(("peak memory over the state", max(peaks), PEAK_TARGET))
    return [
        f"{what}: at most {value:.2f}, target {target:g}: {'reached' if value <= target else 'missed'}"
        for what, value, target in worst
    ]


def main() -> None:
    """Measures, prints, and writes every single figure to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6, 12, 24])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    # Wide enough for a row on one line, also where the terminal's width is not known.
    console = Console(width=max(Console().width, 170))
    figures: dict[Setting, Figures] = {}
    for threads in args.threads:
        for layers in args.layers:
            setting = Setting(layers, threads, args.rows, args.length, args.rounds)
            # In a new process, spawned: what earlier ones have imported, allocated and cached is in no figure.
            context = multiprocessing.get_context("spawn")
            with (
                console.status(f"{layers} layers, {threads} threads"),
                concurrent.futures.ProcessPoolExecutor(1, context) as pool,
            ):
                figures[setting] = pool.submit(measure, setting).result()
    console.print(f"torch {torch.__version__}, {args.rows} x {args.length} tokens, {args.rounds} rounds\n")
    console.print(table(figures))
    console.print(*verdicts(figures), sep="\n")
    if args.json is not None:
        rows = [dataclasses.asdict(setting) | dataclasses.asdict(row) for setting, row in figures.items()]
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
