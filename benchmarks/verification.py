"""How long it takes to prove a program, against tracing, planning and writing it.

    python benchmarks/verification.py [--layers N ...] [--cases NAME ...] [--rounds N]

The steps: GPT-2 of Hugging Face's transformers with its default sizes (12 layers are GPT-2 small), and models of
`cases.py`, all under fused AdamW, donated. Nothing is run, and nothing is compiled: of a compiled step ("compiled") the
graph that the compiler would get is made and proved. Of each, seconds of the processor (median over rounds,
least and most), since other processes may be at work; and what proving takes as a share of tracing. The first round of
all is the first in the process: it reads the schemas of the operators, which later ones know. Each round is called
from deeper in the stack: CPython keeps its stack in pieces of 16 KB, and where a loop's calls cross the end of one they
take longer. Which loops do depends on how deep a caller is, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from cases import CASES
from rich.console import Console
from rich.table import Table

import fdp
from fdp.distributed.group import resolve_group
from fdp.emit.backend import resolve_backend
from fdp.emit.codegen.program import write_program
from fdp.emit.compiled import compiler
from fdp.emit.memory.decisions import plan_memory
from fdp.plan import Plan
from fdp.verify import verify_program

TARGET = 0.1
STAGES = ("trace", "plan", "emit", "verify", "compiled: emit", "compiled: verify")
Step = Callable[[Any, Any], Any]


def _trained(model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], batch: Any) -> tuple[Step, Any, Any]:
    """A training step of a model with its state and batch; `loss` takes the model as a function, and the batch."""
    apply, params, buffers = fdp.from_module(model.train())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return loss(lambda *args, **kwargs: apply(params, state["buffers"], *args, **kwargs)[0], batch)

        value, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": state["buffers"], "opt": opt}, fdp.pmean(value)

    return step, {"params": params, "buffers": buffers, "opt": optimizer.init(params)}, batch


def _gpt2(layers: int) -> tuple[Step, Any, Any]:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    ids = torch.randint(model.config.vocab_size, (2, 64))
    return _trained(model, lambda apply, ids: apply(input_ids=ids, labels=ids).loss, ids)


def _case(name: str) -> tuple[Step, Any, Any]:
    case = CASES[name]
    return _trained(case.model(), lambda apply, batch: case.loss(apply(batch["x"]), batch), case.batch())


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(step: Step, state: Any, batch: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of each stage, in each round."""
    found: dict[str, list[float]] = {name: [] for name in STAGES}
    for at in range(rounds):
        _below(6 * at, lambda: _round(step, state, batch, found))
    return found


def _below(depth: int, call: Callable[[], Any]) -> Any:
    """Call a function from so many frames further down."""
    return _below(depth - 1, call) if depth else call()


def _round(step: Step, state: Any, batch: Any, found: dict[str, list[float]]) -> None:
    made = fdp.data_parallel(step, donate_argnums=0)
    seconds, trace = _seconds(lambda: made.trace(state, batch))
    found["trace"].append(seconds)
    seconds, plan = _seconds(trace.plan)
    found["plan"].append(seconds)
    seconds, program = _seconds(lambda: write_program(plan_memory(plan, False), 0))
    found["emit"].append(seconds)
    seconds, _ = _seconds(lambda: verify_program(plan, program, 0, False))
    found["verify"].append(seconds)
    making, proving = _compiled(plan)
    found["compiled: emit"].append(making)
    found["compiled: verify"].append(proving)


class _Proved(Exception):
    """A graph was proved, and would be compiled now."""


def _compiled(plan: Plan) -> tuple[float, float]:
    """Seconds to make the graph of a compiled step, and to prove it."""
    proving: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seconds, result = _seconds(lambda: function(*args))
            proving.append(seconds)
            return result

        return call

    def stop(*_: Any) -> Any:
        raise _Proved

    def make() -> None:
        try:
            resolve_backend(True).program(plan, resolve_group(None), False)
        except _Proved:
            return

    replaced: dict[str, Any] = {name: timed(getattr(compiler, name)) for name in ("verify_lowered", "verify_loops")}
    with mock.patch.multiple(compiler, lower=stop, **replaced):
        seconds, _ = _seconds(make)
    return seconds - sum(proving), sum(proving)


def _rows(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], tuple[Step, Any, Any]]]]:
    for layers in arguments.layers:
        yield f"GPT-2, {layers} layers", functools.partial(_gpt2, layers)
    for name in arguments.cases:
        yield name, functools.partial(_case, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[12])
    parser.add_argument("--cases", nargs="*", default=["deep-narrow", "host-bound", "resnet18"], choices=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    table = Table(title=f"seconds of the processor, {arguments.rounds} rounds: median (least to most)")
    for column in ("step", "stage", "seconds", f"/ trace (target of verify: {TARGET})"):
        table.add_column(column)
    for name, make in _rows(arguments):
        found = measure(*make(), arguments.rounds)
        for stage, seconds in found.items():
            ratios = [one / two for one, two in zip(seconds, found["trace"], strict=True)]
            table.add_row(name if stage == "trace" else "", stage, _summary(seconds), _summary(ratios))
        table.add_section()
    Console().print(table)


def _summary(numbers: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


if __name__ == "__main__":
    main()
