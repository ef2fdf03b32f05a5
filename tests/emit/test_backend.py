"""A backend that fdp does not know runs, is timed, compared and agreed on: no other code asks which one it is."""

from __future__ import annotations

import ast
import pathlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from bits import same_bits
from imports import imports_of
from samples import exhaustive

import fdp
from fdp.distributed.group import Group
from fdp.emit.backend import Backend
from fdp.emit.codegen.program import Program, write_program
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.savings import NONE
from fdp.plan import Plan


@dataclass(frozen=True)
class Plain(Backend):
    """Writes the plainest program, and proves nothing.

    Attributes:
        compiles: as for all backends.
        rate: what becomes of the number 0.1 in its text.
        draws_alike: as for all backends.
    """

    compiles: bool = False
    rate: float = 0.1
    draws_alike: bool = True

    how = "plain"
    savings = NONE
    by_operation = False
    agreed_text = "made plainly"

    def settled(self, plan: Plan) -> Plain:
        return self

    def program(self, plan: Plan, group: Group, communicates: bool) -> Program:
        made = write_program(plan_memory(plan, communicates, self.savings), group.rank)
        source = made.source.replace("0.1", str(self.rate))
        namespace: dict[str, Any] = dict(made.function.__kwdefaults__)
        exec(compile(source, "<plain>", "exec"), namespace)
        return replace(made, source=source, function=namespace["step"])


def train(w: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def loss_fn(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(batch @ w, 0.5).square().mean()

    loss, grad = fdp.value_and_grad(loss_fn)(w)
    return w - 0.1 * grad, fdp.pmean(loss)


def trained(step: Any, calls: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    w, losses = torch.ones(3, 2), []
    for call in range(calls):
        w, loss = step(w, torch.ones(4, 3) * (1 + call + rank))
        losses.append(loss)
    return [w, *losses]


@pytest.mark.parametrize("compiles", [False, True])
def test_another_backend_runs(compiles: bool) -> None:
    step = fdp.data_parallel(train, compile=Plain(compiles))
    assert same_bits(trained(step), trained(fdp.data_parallel(train)))
    assert step.traces == 1
    assert step.profile(torch.ones(3, 2), torch.ones(4, 3)).step_s > 0


def test_another_backend_is_named() -> None:
    plan = fdp.data_parallel(train).plan(torch.ones(3, 2), torch.ones(4, 3))
    assert repr(plan.emit(compile=Plain())) == "<Emitted train: 1 bucket, 1 rank, plain>"


@pytest.mark.parametrize("compiles", [False, True])
def test_a_wrong_program_of_another_backend_is_refused(compiles: bool) -> None:
    step = fdp.data_parallel(train, compile=Plain(compiles, rate=0.2))
    for _ in range(2):
        with pytest.raises(fdp.CompileError, match="the plain step 'train' does not compute what its operators"):
            step(torch.ones(3, 2), torch.ones(4, 3))


def test_draws_of_another_kind_are_not_compared() -> None:
    other = fdp.data_parallel(train, compile=Plain(rate=0.2, draws_alike=False))
    assert not same_bits(trained(other)[0], trained(fdp.data_parallel(train))[0])


def on_ranks(compiles: bool) -> bool:
    """Of a step that sends enough to be measured."""

    def large(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        a, b = fdp.grad(lambda ws: (batch @ ws[0] @ ws[1]).tanh().square().mean())((w, w * 2))
        return w - 0.1 * (a + b)

    w, batch = torch.eye(512), torch.ones(4, 512) * (1 + dist.get_rank())
    found = [fdp.data_parallel(large, compile=compile)(w, batch) for compile in (Plain(compiles), False)]
    return same_bits(*found)


def of_two_kinds() -> tuple[str, str]:
    step = fdp.data_parallel(train, compile=Plain() if dist.get_rank() == 0 else False)
    with pytest.raises(fdp.FdpError) as caught:
        step(torch.ones(3, 2), torch.ones(4, 3))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("compiles", [pytest.param(False, marks=exhaustive), True])
def test_ranks_run_another_backend_together(compiles: bool) -> None:
    assert ranks.run(2, on_ranks, compiles) == [True, True]


def test_ranks_with_different_backends_are_told() -> None:
    for name, message in ranks.run(2, of_two_kinds):
        assert name == "AgreementError"
        assert "rank 0: made plainly" in message and "rank 1: nothing of the kind" in message


def knows_the_compiler(text: str) -> bool:
    """Whether a file imports the compiler, or the backend that has it."""
    if "ompiled" not in text:
        return False
    names = [each.name or "" for each in imports_of(ast.parse(text))]
    return any(name.startswith(("fdp.emit.compiled", "fdp.emit.backend.Compiled")) for name in names)


def test_other_rooms_do_not_know_the_compiler() -> None:
    root = pathlib.Path(fdp.__file__).parent
    found = {path for path in root.rglob("*.py") if knows_the_compiler(path.read_text())}
    assert found and all(root / "emit" in path.parents for path in found)
    assert knows_the_compiler("def f():\n    from fdp.emit.backend import Compiled")
