"""A step against one process: the network, the data and the comparison that several test files share.

Every oracle runs on each rank by itself, in plain PyTorch and float64, on the data of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F

Tree = dict[str, torch.Tensor]
DOUBLE = torch.float64


def net(params: Tree, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def net_params(seed: int = 4, out: int = 1) -> Tree:
    g = torch.Generator().manual_seed(seed)
    shapes = {"w1": (3, 5), "b1": (5,), "w2": (5, out)}
    return {k: torch.randn(s, generator=g, dtype=DOUBLE) / 2 for k, s in shapes.items()}


def task_loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(params, x).squeeze(-1), y)


def data_of(rank: int, call: int, size: int = 4) -> Tree:
    """A rank's batch for a call; `a*` for support, `b*` for query."""
    g = torch.Generator().manual_seed(1000 * call + rank)
    shapes = {"ax": (size, 3), "ay": (size,), "bx": (size, 3), "by": (size,)}
    return {k: torch.randn(s, generator=g, dtype=DOUBLE) for k, s in shapes.items()}


def leaves(params: Tree) -> Tree:
    return {k: v.detach().clone().requires_grad_() for k, v in params.items()}


def autograd(loss: torch.Tensor, params: Tree, create_graph: bool = False) -> Tree:
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
    return dict(zip(params, grads, strict=True))


def compare(
    step_fn: Callable[[Tree, Tree], Any],
    oracle: Callable[[Tree, list[Tree]], Any],
    params: Tree | None = None,
    sizes: tuple[int, ...] | None = None,
) -> None:
    """Calls a step twice with new data, traced and untraced, and compares it with its oracle each time."""
    import fdp

    world, rank = dist.get_world_size(), dist.get_rank()
    params = net_params() if params is None else params
    step = fdp.data_parallel(step_fn)
    for call in range(2):
        shards = [data_of(r, call, sizes[r] if sizes else 4) for r in range(world)]
        expected = oracle(params, shards)
        for label, run in (("traced", step), ("untraced", step_fn)):
            got = optree.tree_map(lambda x: x.detach(), run(params, shards[rank]))
            torch.testing.assert_close(
                got, expected, rtol=1e-10, atol=1e-12, msg=lambda m, c=call, n=label: f"call {c}, {n}: {m}"
            )
            fdp.assert_replicated(got)
