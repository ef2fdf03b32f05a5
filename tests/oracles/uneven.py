"""Batches of uneven lengths for each rank, and a step that weighs its gradients by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fdp

DOUBLE = torch.float64
Batches = list[dict[str, Tensor]]


def data(sizes: tuple[tuple[int, ...], ...]) -> list[Batches]:
    """The batches of each rank: `sizes[rank]` are the lengths of its batches."""
    g = torch.Generator().manual_seed(0)
    both = [[torch.rand((n, 4), generator=g, dtype=DOUBLE) + 0.1 for n in own] for own in sizes]
    return [[{"x": t[:, :3].contiguous(), "y": t[:, 3].contiguous()} for t in own] for own in both]


def loss_of(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return ((batch["x"] @ params["w"]).tanh() + params["b"] - batch["y"]).square().mean()


def start() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.3, -0.2, 0.1], dtype=DOUBLE), "b": torch.tensor(0.5, dtype=DOUBLE)}


def of_the_gradients(state: dict[str, Tensor], batch: Any) -> Any:
    grads, loss = torch.func.grad_and_value(loss_of)(state, batch[0])
    grads, loss = fdp.pmean((grads, loss), weight=batch[1])
    return {k: p - 0.5 * grads[k] for k, p in state.items()}, loss


def broken(batches: Batches, at: int, error: Exception) -> Iterator[dict[str, Tensor]]:
    yield from batches[:at]
    raise error
