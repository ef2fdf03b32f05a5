"""The trace of a training step by its sizes, with costs and networks that are drawn."""

from __future__ import annotations

import dataclasses
import random

import optree
import torch
from torch import fx

import fdp
from fdp.plan import Costs
from fdp.trace import Operation, Reduction, Trace


def training(sizes: list[int], read: list[bool], *, joint: bool = False, others: tuple[int, ...] = ()) -> Trace:
    """The trace of a step: a pass that makes gradients, their means, and updates; in the order of the user's program.

    Args:
        sizes: elements of each gradient, in production order.
        read: whether each has an update.
        joint: whether all updates need one more value that is made of all gradients, as clipping does.
        others: which gradients are of another dtype.
    """
    operations = [Operation("forward", "aten.forward.default", ())]
    reductions: list[Reduction] = []
    for index, size in enumerate(sizes):
        dtype = torch.float64 if index in others else torch.float32
        operations.append(Operation(f"b{index}", "aten.mm.default", (len(operations) - 1,), backward=True))
        reductions.append(
            Reduction(
                f"g{index}",
                "gradient",
                "mean",
                0,
                (size,),
                dtype,
                torch.device("cpu"),
                size * dtype.itemsize,
                "mm",
                len(operations) - 1,
                -1,
                "",
            )
        )
    operations.append(Operation("last", "aten.mm.default", (len(operations) - 1,), backward=True))
    for index, reduction in enumerate(reductions):
        reductions[index] = dataclasses.replace(reduction, operation=len(operations))
        operations.append(Operation(f"m{index}", "fdp.mean", (reduction.position,), reduction=index))
    norm: tuple[int, ...] = ()
    if joint:
        operations.append(Operation("norm", "aten.norm.default", tuple(r.operation for r in reductions)))
        norm = (len(operations) - 1,)
    for index, reduction in enumerate(reductions):
        if read[index]:
            operations.append(Operation("update", "aten._foreach.x", (reduction.operation, *norm), entry=index))
    nothing = optree.tree_structure(())
    return Trace("step", "here:1", 2, (), (), tuple(operations), tuple(reductions), (), (), (),
                 fx.GraphModule(torch.nn.Module(), fx.Graph()), nothing, nothing)  # fmt: skip


def drawn_costs(trace: Trace, rng: random.Random) -> Costs:
    """Costs in microseconds, some of them nothing, at a scale at which they matter."""
    scale = rng.choice([1e-6, 1e-5, 1e-4])
    operations = [rng.choice([0, 1, 2, 5, rng.random()]) * scale for _ in trace.operations]
    start = rng.choice([0, 1e-6, 2e-5])
    return Costs(tuple(operations), start, rng.choice([0, 1e-10, 3e-9]), "estimated")


def drawn_network(rng: random.Random, slowdown: float = 0.0) -> fdp.Network:
    return fdp.Network(
        rng.choice([0, 1e-6, 1e-5, 1e-4]), rng.choice([1e7, 1e8, 1e9]), rng.choice(["ring", "tree"]),
        in_flight=rng.choice([1, 1, 2, 4]), compute_slowdown=slowdown,
    )  # fmt: skip
