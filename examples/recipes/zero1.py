"""ZeRO-1 by hand: each rank keeps the optimizer's state of its part of the parameters, and updates that part.

    torchrun --standalone --nproc-per-node 2 examples/recipes/zero1.py
    python examples/recipes/zero1.py           # one process, whose part is everything

`fdp.shard` does this, and better: it divides leaf by leaf, in buckets, while the backward pass goes on. Here it is
written with the public collectives alone. The gradients of each rank are laid end to end; `fdp.pmean_scatter` averages
them and leaves each rank its part; AdamW updates that part, with moments that are labelled as the rank's own;
`fdp.all_gather` puts the new parameters together. Printed are the distance from AdamW on the whole state, and the bytes
of optimizer state of each rank.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020), section 5.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fdp


def flatten(tree: dict[str, Tensor], ranks: int) -> Tensor:
    """All leaves, end to end, with zeros behind them so that the ranks' parts are equal."""
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.values()])
    return torch.nn.functional.pad(flat, (0, -len(flat) % ranks))


def unflatten(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves that `flatten` has laid end to end."""
    pieces = flat[: sum(leaf.numel() for leaf in like.values())].split([leaf.numel() for leaf in like.values()])
    return {name: piece.view(leaf.shape) for (name, leaf), piece in zip(like.items(), pieces, strict=True)}


def size(tree: Any) -> int:
    """Bytes of all leaves."""
    leaves = optree.tree_leaves(tree)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="ZeRO-1, written by hand.")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, ranks = int(fdp.axis_index()), int(fdp.axis_size())
    torch.manual_seed(0)
    apply, params, _ = fdp.from_module(nn.Sequential(nn.Linear(32, 129), nn.Tanh(), nn.Linear(129, 1)))
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def loss_fn(params: Any, batch: Any) -> Any:
        return (apply(params, {}, batch["x"])[0] - batch["y"]).square().mean()

    @fdp.data_parallel(donate_argnums=0)
    def step_by_hand(state: Any, batch: Any) -> Any:
        params, part = state["params"], state["part"]
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)  # torch.func does not average
        own_grads = fdp.pmean_scatter(flatten(grads, ranks))
        own, opt = optimizer.update({"own": own_grads}, state["opt"], {"own": part})
        whole = fdp.all_gather(own["own"]).reshape(-1)
        return {"params": unflatten(whole, params), "part": own["own"], "opt": opt}, fdp.pmean(loss)

    @fdp.data_parallel(donate_argnums=0)
    def step_whole(state: Any, batch: Any) -> Any:
        loss, grads = fdp.value_and_grad(loss_fn)(state["params"], batch)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    params = fdp.replicate(params)
    part = flatten(params, ranks).chunk(ranks)[rank].clone()
    by_hand: Any = {"params": params, **fdp.per_rank({"part": part, "opt": optimizer.init({"own": part})})}
    whole: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})
    whole_bytes, own_bytes = size(whole["opt"]), size(optimizer.init({"own": part}))
    teacher = torch.randn(32, 1)
    for step in range(args.steps):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        batch = {"x": x, "y": (x @ teacher).tanh()}
        by_hand, loss = step_by_hand(by_hand, batch)
        whole, loss_of_whole = step_whole(whole, batch)
    far = max(float((by_hand["params"][name] - p).abs().max()) for name, p in whole["params"].items())
    fdp.assert_replicated(by_hand["params"])
    if rank == 0:
        print(
            f"loss {loss.item():.4f}, of the whole state {loss_of_whole.item():.4f}; farthest parameter {far:.1e} apart"
        )
        print(f"optimizer state: {own_bytes:,} bytes on each of {ranks} ranks, {whole_bytes:,} undivided")


if __name__ == "__main__":
    fdp.initialize()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
