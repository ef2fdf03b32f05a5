"""Draw digits with a Wasserstein GAN with gradient penalty (WGAN-GP), on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/wgan_gp.py     # two ranks of this machine
    python examples/wgan_gp.py                                       # the same program, a world of one
    python examples/wgan_gp.py --picture digits.png                  # and a picture of what was drawn (matplotlib)

Two players with an optimizer each, in one step: five updates of the critic, then one of the generator. The critic's
loss holds the norm of its own gradient, so its gradient is a second derivative. The digits are those of
scikit-learn, 1,797 of 8 x 8 pixels; a third is kept apart, to compare with what the generator draws.

Gulrajani et al.: Improved Training of Wasserstein GANs, NeurIPS 2017.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.func import grad, vmap

import fdp

PIXELS, LATENT = 64, 16  # of a digit, and of the noise that one is made from


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="WGAN-GP on digits with fdp.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="updates of the generator")
    parser.add_argument("--critic-steps", type=int, default=5, help="updates of the critic for each of the generator")
    parser.add_argument("--batch-size", type=int, default=64, help="digits in an update, over all ranks")
    parser.add_argument("--penalty", type=float, default=10.0, help="weight of the gradient penalty")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of both Adams")
    parser.add_argument("--width", type=int, default=256, help="width of both networks")
    parser.add_argument("--picture", help="write what the generator draws to this PNG file")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and noise")
    args = parser.parse_args(argv)
    if min(args.steps, args.critic_steps, args.batch_size) < 1:
        parser.error("--steps, --critic-steps and --batch-size must be at least 1")
    if args.picture and not pathlib.Path(args.picture).absolute().parent.is_dir():
        parser.error(f"--picture {args.picture}: there is no such folder")  # now, and not after the training
    return args


def perceptron(inputs: int, width: int, outputs: int, *last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs), *last,
    )  # fmt: skip


def real_digits() -> tuple[Tensor, Tensor, Any]:
    """Digits to train on and digits kept apart, [n, 64] from -1 to 1, and a classifier of them; equal on all ranks."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float() / 8 - 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut = len(x) * 2 // 3
    return x[order[:cut]], x[order[cut:]], SVC(C=10.0).fit(x.numpy(), labels)


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The Frechet distance of the Gaussians with the means and covariances of two sets of digits, in pixels."""
    a, b = a.double(), b.double()
    one, two = torch.cov(a.T), torch.cov(b.T)
    # The trace of the root of a product: the sum of the roots of its eigenvalues, which are real and not negative.
    root = torch.linalg.eigvals(one @ two).real.clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + one.trace() + two.trace() - 2 * root)


def save_picture(path: str, drawn: Tensor) -> None:
    from matplotlib import image

    framed = nn.functional.pad(drawn[:100].view(10, 10, 8, 8), (1, 1, 1, 1), value=-1.0)
    grid = framed.permute(0, 2, 1, 3).reshape(100, 100)
    image.imsave(path, grid.repeat_interleave(6, 0).repeat_interleave(6, 1).numpy(), cmap="gray_r")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()
    if args.batch_size % ranks:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared evenly by {ranks} ranks")

    def say(text: str) -> None:
        if rank == 0:  # one rank speaks for all
            print(text, flush=True)

    train, kept, classifier = real_digits()
    torch.manual_seed(args.seed)
    generate, g_params, g_buffers = fdp.from_module(perceptron(LATENT, args.width, PIXELS, nn.Tanh()))
    criticise, c_params, c_buffers = fdp.from_module(perceptron(PIXELS, args.width, 1))
    adam = fdp.optim.from_torch(torch.optim.Adam, lr=args.lr, betas=(0.0, 0.9))
    state: Any = {
        "generator": {"params": g_params, "opt": adam.init(g_params)},
        "critic": {"params": c_params, "opt": adam.init(c_params)},
    }
    state = fdp.replicate(state)  # rank 0's weights, whatever the others drew
    fdp.seed(args.seed)  # from here on each rank draws numbers of its own

    def draw(params: Any, count: int) -> Tensor:
        return generate(params, g_buffers, torch.randn(count, LATENT))[0]

    def score(params: Any, digits: Tensor) -> Tensor:
        return criticise(params, c_buffers, digits)[0].squeeze(-1)

    def critic_loss(params: Any, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        between = torch.lerp(real, fake, torch.rand(len(real), 1))
        # The slope at each point, by itself and local to this rank: `torch.func.grad`. What the optimizer gets is the
        # gradient of this, by `fdp.value_and_grad`: its mean over ranks.
        slopes = vmap(grad(lambda digit: score(params, digit)))(between)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        distance = score(params, real).mean() - score(params, fake).mean()
        return args.penalty * penalty - distance, distance

    def generator_loss(params: Any, critic: Any, count: int) -> Tensor:
        return -score(critic, draw(params, count)).mean()

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batches: Tensor) -> Any:
        generator, critic = state["generator"], state["critic"]
        for real in batches:  # unrolled when the step is traced: [critic steps, digits, pixels]
            fake = draw(generator["params"], len(real)).detach()
            (_, distance), grads = fdp.value_and_grad(critic_loss, has_aux=True)(critic["params"], real, fake)
            params, opt = adam.update(grads, critic["opt"], critic["params"])
            critic = {"params": params, "opt": opt}
        grads = fdp.grad(generator_loss)(generator["params"], critic["params"], batches.shape[1])
        params, opt = adam.update(grads, generator["opt"], generator["params"])
        state = {"generator": {"params": params, "opt": opt}, "critic": critic}
        return state, fdp.pmean(distance)

    count = args.batch_size // ranks

    def batches() -> Tensor:
        return train[torch.randint(len(train), (args.critic_steps, count))]

    def judge() -> tuple[Tensor, float]:
        """What the generator draws from the same noise each time, and how far that is from the digits kept apart."""
        noise = torch.randn(2000, LATENT, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            drawn = generate(state["generator"]["params"], g_buffers, noise)[0]
        return drawn, frechet_distance(drawn, kept)

    say(f"{len(train)} digits on {ranks} ranks, {args.critic_steps} updates of the critic a step")
    say(f"Frechet distance from {len(kept)} digits kept apart: {judge()[1]:.2f} before training")
    every, start_s = max(1, args.steps // 10), time.perf_counter()
    for i in range(1, args.steps + 1):
        state, distance = train_step(state, batches())
        if i % every == 0:
            say(
                f"step {i:5d}/{args.steps}  distance seen by the critic {distance.item():.3f}; Frechet distance "
                f"{judge()[1]:.2f}"
            )
    say(f"{args.steps / (time.perf_counter() - start_s):.0f} steps/s with the first call")
    fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
    say(f"all {ranks} ranks hold the same bits")
    drawn, found = judge()
    say(f"Frechet distance {found:.2f}; that of the real digits to train on {frechet_distance(train, kept):.2f}")
    counts = torch.bincount(torch.from_numpy(classifier.predict(drawn.numpy())), minlength=10)
    say("of 2000 drawn, a classifier takes for 0, 1, ... 9: " + ", ".join(str(n) for n in counts.tolist()))
    if args.picture and rank == 0:
        save_picture(args.picture, drawn)
        say(f"wrote {args.picture}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
