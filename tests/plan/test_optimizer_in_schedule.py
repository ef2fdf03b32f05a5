"""The optimizer in the schedule: updates run bucket by bucket, unless something in them needs every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch
from fake_ranks import fake_group

import fdp
from fdp.plan import Plan, Run, Start, Wait

Tree = Any
LAYERS = 4


def params() -> Tree:
    generator = torch.Generator().manual_seed(0)
    return {f"w{k}": torch.randn(8, 8, generator=generator, requires_grad=True) for k in range(LAYERS)}


def plan_of(change: Any, **options: Any) -> Plan:
    """The plan of a training step on two ranks with a bucket for each gradient."""
    cls = options.pop("cls", torch.optim.AdamW)
    optimizer = fdp.optim.from_torch(cls, **{"lr": 0.1, **options})

    @fdp.data_parallel(donate_argnums=0, group=fake_group(2), bucket_cap_mb=1e-6)
    def step(state: Tree, batch: torch.Tensor) -> Tree:
        def loss_fn(p: Tree) -> torch.Tensor:
            x = batch
            for name in p:
                x = (x @ p[name]).tanh()
            return x.square().mean()

        grads = change(fdp.grad(loss_fn)(state["params"]))
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}

    start = params()
    return step.plan({"params": start, "opt": optimizer.init(start)}, torch.ones(3, 8))


def events(plan: Plan, *operators: str) -> list[str]:
    """Starts, waits, and the calls of some operators with the number of their entries, in order."""
    found = []
    for item in plan.schedule:
        if isinstance(item, Run):
            target = plan.trace.operations[item.operations[0]].target
            if any(f"{name}." in target for name in operators):
                found.append(f"update of {len(item.operations)}")
        else:
            found.append(f"{'start' if isinstance(item, Start) else 'wait'} {item.bucket}")
    return found


def clipped(grads: Tree) -> Tree:
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    return optree.tree_map(lambda g: g * (1.0 / norm).clamp(max=1.0), grads)


UPDATES = [
    ("_fused_adamw_", {"fused": True}),
    ("_fused_sgd_", {"cls": torch.optim.SGD, "fused": True, "momentum": 0.9}),
    ("_foreach_add_", {"cls": torch.optim.SGD, "foreach": True}),
]


@pytest.mark.parametrize(("operator", "options"), UPDATES, ids=[name for name, _ in UPDATES])
def test_the_update_of_a_bucket_runs_while_the_next_is_in_flight(operator: str, options: dict[str, Any]) -> None:
    found = events(plan_of(lambda grads: grads, **options), operator)
    starts = [f"start {k}" for k in range(LAYERS)]
    assert [event for event in found if event.startswith("start")] == starts
    # All starts come first: what needs a result is put off behind the whole of the backward pass.
    assert found[:LAYERS] == starts
    updates = found[LAYERS:]
    assert updates == [event for k in range(LAYERS) for event in (f"wait {k}", "update of 1")]


def test_clipping_by_the_global_norm_waits_for_every_gradient() -> None:
    found = events(plan_of(clipped), "_fused_adamw_")
    # The planner knows nothing of clipping: the norm depends on every bucket.
    assert found == [f"start {k}" for k in range(LAYERS)] + [f"wait {k}" for k in range(LAYERS)] + [
        f"update of {LAYERS}"
    ]


def test_clipping_each_gradient_by_itself_does_not() -> None:
    def each(grads: Tree) -> Tree:
        return optree.tree_map(lambda g: g * (1.0 / g.norm()).clamp(max=1.0), grads)

    found = events(plan_of(each), "_fused_adamw_")
    assert found[LAYERS:] == [event for k in range(LAYERS) for event in (f"wait {k}", "update of 1")]


def test_an_optimizer_that_is_not_elementwise_stays_whole_for_each_tensor() -> None:
    plan = plan_of(lambda grads: grads, cls=torch.optim.Muon, lr=0.1)
    waits = [at for at, item in enumerate(plan.schedule) if isinstance(item, Wait)]
    products = [
        at
        for at, item in enumerate(plan.schedule)
        if isinstance(item, Run) and "mm." in plan.trace.operations[item.operations[0]].target and at > waits[0]
    ]
    # Its matrix products for one parameter run between the waits for that one's bucket and the next.
    assert all(any(a < at < b for at in products) for a, b in itertools.pairwise(waits))
