"""PPO: each rank plays in environments of its own, and all update one policy.

    torchrun --standalone --nproc-per-node 2 examples/recipes/ppo.py
    python examples/recipes/ppo.py           # one process

A pole stands on a cart, which is pushed to the left or to the right until the pole falls. The environments are
tensors, labelled with `fdp.per_rank`, and one step moves all of a rank's. Another step updates policy and value with
`fdp.value_and_grad`. Advantages are normalised with the mean and deviation over all ranks, by `fdp.pmean`. (With those
of each rank alone, ranks would weigh the same advantage differently.) Printed is the mean return of fresh episodes of
at most 200 moves, where each move with the pole up is worth 1.

References:
    Schulman et al., Proximal Policy Optimization Algorithms (2017), algorithm 1 and equation 7.
    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (ICLR 2016).
    Barto, Sutton and Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems (1983).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fdp


def start(key: Tensor, carts: int) -> Tensor:
    """Position, speed, angle and angular speed of carts [carts, 4], all nearly zero."""
    return fdp.random.uniform(key, (carts, 4), minval=-0.05, maxval=0.05)


def move(carts: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """Carts [n, 4] after 0.02 s of a push [n] (0 to the left, 1 to the right), and whether each has failed [n]."""
    _, speed, angle, spin = carts.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    pushed = ((2 * push - 1) * 10.0 + 0.05 * spin.square() * sin) / 1.1  # 10 N; cart 1 kg; pole 0.1 kg and 1 m
    spin_rate = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    speed_rate = pushed - 0.05 * spin_rate * cos / 1.1
    rates = torch.stack([speed, speed_rate, spin, spin_rate], 1)
    carts = carts + 0.02 * rates
    return carts, (carts[:, 0].abs() > 2.4) | (carts[:, 2].abs() > 0.2095)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Proximal policy optimization on many ranks.")
    parser.add_argument("--rounds", type=int, default=10, help="of playing and learning")
    parser.add_argument("--carts", type=int, default=128, help="environments, over all ranks")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    moves, discount, trace_decay, clip = 32, 0.98, 0.95, 0.2

    def network(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    torch.manual_seed(0)
    policy, policy_params, _ = fdp.from_module(network(2))
    value, value_params, _ = fdp.from_module(network(1))
    params: Any = {"policy": policy_params, "value": value_params}
    optimizer = fdp.optim.clipped(fdp.optim.from_torch(torch.optim.Adam, lr=3e-3), 0.5)

    def act(params: Any, carts: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = policy(params["policy"], {}, carts)[0].log_softmax(1)
        push = (fdp.random.uniform(key, len(carts)) < log_probs[:, 1].exp()).long()
        return push, log_probs.gather(1, push[:, None])[:, 0]

    @fdp.data_parallel(donate_argnums=1, batch_argnums=())
    def play(params: Any, env: Any) -> Any:
        key, act_key, start_key = fdp.random.split(env["key"], 3)
        push, log_prob = act(params, env["carts"], act_key)
        carts, failed = move(env["carts"], push)
        seen = {"carts": env["carts"], "push": push, "log_prob": log_prob, "failed": failed.float()}
        carts = torch.where(failed[:, None], start(start_key, len(carts)), carts)
        return {"carts": carts, "key": key}, fdp.per_rank(seen)

    @fdp.data_parallel(donate_argnums=0)
    def update(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            log_probs = policy(params["policy"], {}, batch["carts"])[0].log_softmax(1)
            ratio = (log_probs.gather(1, batch["push"][:, None])[:, 0] - batch["log_prob"]).exp()
            gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(1 - clip, 1 + clip) * batch["advantage"])
            error = value(params["value"], {}, batch["carts"])[0][:, 0] - batch["return"]
            return 0.5 * error.square().mean() - gain.mean()

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    @torch.no_grad()
    def advantages(params: Any, seen: Any, last: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised advantages, and returns, of each move [moves, carts]."""
        values = value(params["value"], {}, torch.cat([seen["carts"], last[None]]))[0][..., 0]
        stays = 1 - seen["failed"]
        surprise = 1 + discount * stays * values[1:] - values[:-1]  # each move is worth 1
        found = [surprise[-1]]
        for t in reversed(range(moves - 1)):
            found.append(surprise[t] + discount * trace_decay * stays[t] * found[-1])
        raw = torch.stack(found[::-1])
        centred = raw - fdp.pmean(raw.mean())
        return centred / (fdp.pmean(centred.square().mean()).sqrt() + 1e-8), raw + values[:-1]

    @torch.no_grad()
    def mean_return(params: Any) -> float:
        """The mean return of fresh episodes: for how many of 200 moves a pole stays up, over the carts of all ranks."""
        key = fdp.random.fold_in(fdp.random.key(1), rank)
        carts, up = start(key, args.carts // ranks), torch.ones(args.carts // ranks)
        total = torch.zeros(())
        for t in range(200):
            carts, failed = move(carts, act(params, carts, fdp.random.fold_in(key, t))[0])
            up = up * ~failed
            total += up.mean()
        return fdp.pmean(total).item()

    state: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})
    key = fdp.random.fold_in(fdp.random.key(0), rank)
    env: Any = fdp.per_rank({"carts": start(key, args.carts // ranks), "key": key})
    for round_ in range(args.rounds + 1):
        if round_ in (0, args.rounds // 2, args.rounds):
            earned = mean_return(state["params"])
            if rank == 0:
                print(f"after {round_ * moves * args.carts:6,} moves the mean return is {earned:.0f} of 200")
        if round_ == args.rounds:
            break
        played = []
        for _ in range(moves):
            env, seen = play(state["params"], env)
            played.append(seen)
        batch = {name: torch.stack([seen[name] for seen in played]) for name in seen}
        batch["advantage"], batch["return"] = advantages(state["params"], batch, env["carts"].value)
        flat = {name: each.flatten(0, 1) for name, each in batch.items()}
        for epoch in range(4):
            shuffle = torch.Generator().manual_seed(1000 * round_ + epoch)
            for chosen in torch.randperm(len(flat["push"]), generator=shuffle).chunk(4):
                state, _ = update(state, {name: each[chosen] for name, each in flat.items()})
    fdp.assert_replicated(state)
    if rank == 0:
        print(f"on {ranks} ranks, each with {args.carts // ranks} environments")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
