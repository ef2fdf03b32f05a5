"""Three steps with all that a validator looks at, planned, written and proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_ranks import fake_group

import fdp
from fdp.emit.codegen.program import Program, write_program
from fdp.emit.memory.decisions import plan_memory
from fdp.plan import Plan
from fdp.verify import verify_program


def everything(state: Any, batch: torch.Tensor) -> Any:
    """Buckets of all kinds, places that are views, a loop."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().square().mean()

    value, grad = fdp.accumulate(fdp.value_and_grad(loss), 2)(state["w"], batch)
    h = (batch @ state["w"]).sigmoid()
    large = fdp.pmean((h.sum() * torch.ones(600, 600)).tanh())
    rows = fdp.all_gather(h[1:3, 1:] + 1)
    first = fdp.broadcast(h.t() * 2, root=fdp.axis_size() - 1)
    counted = fdp.psum((h > 0.5).sum(0))
    return state["w"] - grad, value, large[1:, ::2] + 1, rows * 2, first + 1, counted * 3, fdp.pmax(h * 5)


def narrow(w: torch.Tensor, batch: torch.Tensor) -> Any:
    loss, grad = fdp.value_and_grad(lambda w: (batch @ w).tanh().square().sum())(w)
    return w - grad, fdp.pmean(loss)


def parts(w: torch.Tensor, batch: torch.Tensor) -> Any:
    """What gives each rank a part of its own."""
    rows = torch.cat([batch, batch * 2, batch * 3]) @ w
    added, exchanged = fdp.pmean_scatter(rows.tanh()), fdp.all_to_all(rows.sin(), 0, 0)
    return fdp.per_rank((added * 2, exchanged * 2, fdp.ppermute(rows.cos(), [(0, 0)]) * 2))


STEPS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "everything": (everything, {"w": torch.eye(4)}, {"bucket_cap_mb": 0.00001}),
    "parts": (parts, torch.eye(4), {"bucket_cap_mb": 0.00001}),
    "narrow": (narrow, torch.eye(4), {"wire_dtype": torch.bfloat16, "accumulate_dtype": torch.float32}),
}


def emitted(name: str, world: int) -> tuple[Plan, Program]:
    step, state, options = STEPS[name]
    transformed = fdp.data_parallel(step, group=fake_group(world), check_replication=False, **options)
    plan = transformed.plan(state, torch.ones(4, 4))
    program = write_program(plan_memory(plan, world > 1), 0)
    verify_program(plan, program, 0, world > 1)
    return plan, program
