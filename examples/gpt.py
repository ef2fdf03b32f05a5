"""Train a small GPT on the sources of Python's standard library, byte by byte, on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/gpt.py     # two ranks of this machine
    python examples/gpt.py                                       # the same program, a world of one

The text is what lies beside `os.py` in your Python: about 12 MB, of which every twentieth file is held out. The model
never sees a word list: it predicts the next of 256 bytes, and is measured in bits per byte.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import fdp

TEST_WINDOWS, TEST_BATCH = 512, 32


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with fdp.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate of the schedule")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of a gradient")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a rank's batch, one after the other")
    parser.add_argument("--compile", action="store_true", help="lower the whole step with inductor")
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch_size, args.microbatches) < 1 or args.length < 2 or args.width % args.heads:
        parser.error("numbers must be at least 1, --length at least 2, and --heads divide --width")
    return args


def find_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def read_sources() -> tuple[Tensor, Tensor]:
    """The bytes of all files to train on, and of those held out, uint8."""
    library = pathlib.Path(os.__file__).parent
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    texts = [path.read_bytes() for path in files if "tests" not in path.parts and "test" not in path.parts]

    def together(chosen: list[bytes]) -> Tensor:
        return torch.frombuffer(bytearray(b"\0".join(chosen)), dtype=torch.uint8)

    return together([t for i, t in enumerate(texts) if i % 20]), together(texts[::20])


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes [batch, length] to logits [batch, length, 256]; input and output share one table."""

    def __init__(self, length: int, layers: int, width: int, heads: int):
        super().__init__()
        self.table, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the last layer of each branch smaller, the deeper the model is
                nn.init.normal_(
                    p, std=0.02 if not name.endswith(("proj.weight", "down.weight")) else 0.02 / math.sqrt(2 * layers)
                )

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text) + self.position.weight[: text.shape[1]]
        return self.norm(self.blocks(x)) @ self.table.weight.T


def make_optimizer(lr: float, steps: int) -> fdp.optim.Optimizer:
    """AdamW that decays matrices, and neither biases nor gains, and follows a schedule."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        warmup = max(1, steps // 10)  # up in a straight line, then down along a cosine to a tenth
        up = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        down = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup), eta_min=lr / 10)
        return SequentialLR(optimizer, [up, down], milestones=[warmup])

    def adamw(weight_decay: float) -> fdp.optim.Optimizer:
        inner = fdp.optim.from_torch(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
        return fdp.optim.scheduled(inner, fdp.optim.schedule_from_torch(schedule, lr, steps))

    return fdp.optim.partition(
        lambda name, p: "matrices" if p.dim() >= 2 else "biases and gains",
        {"matrices": adamw(0.1), "biases and gains": adamw(0.0)},
    )


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """The bytes from each start on, and one more, since the last has to be predicted too: int64 [n, length + 1]."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def write(predict: Callable[[Tensor], Tensor], prompt: bytes, count: int, length: int, device: torch.device) -> str:
    """Draw bytes one after the other, with a temperature of 0.8."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(prompt))[None]
    for _ in range(count):
        logits = predict(text[:, -length:].to(device))[:, -1].cpu()
        text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = find_device()
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()
    if args.batch_size % (ranks * args.microbatches):
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be shared evenly by {ranks} ranks, {args.microbatches} parts each"
        )

    def say(text: str) -> None:
        if rank == 0:  # one rank speaks for all
            print(text, flush=True)

    train, held_out = read_sources()
    say(f"{len(train):,} bytes to train on, {len(held_out):,} held out")
    torch.manual_seed(args.seed)
    apply, params, buffers = fdp.from_module(GPT(args.length, args.layers, args.width, args.heads).to(device))
    say(f"{sum(p.numel() for p in params.values()):,} parameters")
    optimizer = make_optimizer(args.lr, args.steps)

    def loss_of(params: Any, text: Tensor) -> Tensor:
        logits, _ = apply(params, buffers, text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    # Donated: the new state takes the old one's memory, so the state exists once.
    @fdp.data_parallel(donate_argnums=0, compile=args.compile)
    def train_step(state: Any, text: Tensor) -> Any:
        # `loss` is this rank's own, `grads` are the mean over ranks already: what is clipped is their norm.
        value_and_grad = fdp.accumulate(fdp.value_and_grad(loss_of), args.microbatches)
        loss, grads = value_and_grad(state["params"], text)
        grads, norm = fdp.optim.clip_by_global_norm(grads, args.clip)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, {"loss": fdp.pmean(loss), "norm": norm}

    @fdp.data_parallel
    def mean_loss(params: Any, text: Tensor) -> Tensor:
        return fdp.pmean(loss_of(params, text))

    # Windows of the held-out files, evenly spread; as many on each rank, so that the mean of means is the mean.
    count = max(1, TEST_WINDOWS // (TEST_BATCH * ranks)) * TEST_BATCH * ranks
    starts = torch.linspace(0, len(held_out) - args.length - 1, count).long()[rank::ranks]
    tests = [windows(held_out, part, args.length).to(device) for part in starts.split(TEST_BATCH)]

    state = fdp.replicate({"params": params, "opt": optimizer.init(params)})  # rank 0's, whatever others drew
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # and each rank reads at places of its own

    def batch() -> Tensor:
        starts = torch.randint(len(train) - args.length, (args.batch_size // ranks,), generator=generator)
        return windows(train, starts, args.length).to(device)

    plan = train_step.plan(state, batch())  # what will be sent, before anything was; all ranks ask, one prints
    say(str(plan))
    every, losses, start_s = max(1, args.steps // 10), [], time.perf_counter()
    for i in range(args.steps):
        state, metrics = train_step(state, batch())
        losses.append(metrics["loss"])
        if (i + 1) % every == 0:
            loss = torch.stack(losses[-every:]).mean().item()
            read = (i + 1) * args.batch_size * args.length
            speed = read / (time.perf_counter() - start_s)
            say(
                f"step {i + 1:5d}/{args.steps}  {loss / math.log(2):.3f} bits per byte, norm of the gradient "
                f"{metrics['norm'].item():.2f}, {read:,} bytes at {speed:,.0f}/s"
            )

    fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
    say(f"all {ranks} ranks hold the same bits")
    found = torch.stack([mean_loss(state["params"], part) for part in tests]).mean().item()
    say(f"held-out files: {found / math.log(2):.3f} bits per byte")
    if rank == 0 and args.sample:
        with torch.no_grad():
            say(write(lambda text: apply(state["params"], buffers, text)[0], b"def ", args.sample, args.length, device))


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun; on a GPU both backends, as the learning rate lives on the CPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
