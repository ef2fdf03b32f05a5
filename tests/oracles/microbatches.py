"""Parameters, batches, a loss, and its gradients on the whole batch, for gradients in microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tree = dict[str, torch.Tensor]


def params_of(width: int = 16, dtype: torch.dtype = torch.float64) -> Tree:
    g = torch.Generator().manual_seed(1)
    shapes = {"w1": (6, width), "b1": (width,), "w2": (width, 3), "unused": (4,)}
    return {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}


def batch_of(rows: int, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.float64) -> Tree:
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(rows, 6, generator=g, dtype=dtype), torch.randint(3, (rows,), generator=g)
    own = rows // world
    return {"x": x[rank * own : (rank + 1) * own], "y": y[rank * own : (rank + 1) * own]}


def loss_fn(params: Tree, batch: Tree) -> torch.Tensor:
    hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    return F.cross_entropy(hidden @ params["w2"], batch["y"])


def plain(loss: Callable[..., Any], params: Tree, batch: Tree) -> tuple[torch.Tensor, Tree]:
    """The oracle: plain autograd on the whole batch."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    value = loss(leaves, batch)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), found, strict=True)]
    return value.detach(), dict(zip(params, grads, strict=True))
