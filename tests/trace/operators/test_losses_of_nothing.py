"""Losses of no samples, as of a rank whose data have run out: what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import some

import fdp

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "mse, a sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "l1": F.l1_loss,
    "cross entropy": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "nll": lambda x, y: F.nll_loss(x, y[:, 0].long()),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, -y),
}


@pytest.mark.parametrize("compile", some([False, True]))
@pytest.mark.parametrize("name", some(LOSSES, every=3))
def test_gradients_are_those_of_plain_pytorch(name: str, compile: bool) -> None:
    loss = LOSSES[name]
    own = lambda w, b: fdp.per_rank(fdp.value_and_grad(lambda w: loss(b[0] @ w, b[1]))(w))  # noqa: E731
    step = fdp.data_parallel(own, compile=compile)
    for rows in (3, 0):
        batch = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0)), torch.rand(rows, 3)
        w = torch.ones(2, 3, requires_grad=True)
        expected = loss(batch[0] @ w, batch[1])
        (grad,) = torch.autograd.grad(expected, w)
        found = step(w.detach(), batch)
        torch.testing.assert_close(found, (expected.detach(), grad), equal_nan=True)
