"""Small models, batches and steps that the tests share; every one is built from a fixed seed.

Nothing here imports fdp except `fdp_step`, so that the oracles stay plain PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Six inputs, three classes, ReLU and tanh, one layer without a bias."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.Tanh(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).to(dtype)


def cnn(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two convolutions with BatchNorm, pooling, 8x8 single-channel images, three classes."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    ).to(dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        y = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """A decoder whose output layer is its token embedding (tied), with dropout in three places."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    """Two blocks of width 16, vocabulary 13, context 8."""
    torch.manual_seed(3)
    return GPT(13, 16, 2, 2, 8, dropout).to(dtype)


def gpt_dropout(dtype: torch.dtype = torch.float32) -> nn.Module:
    """`gpt` with a dropout of 0.2."""
    return gpt(dtype, 0.2)


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "gpt_dropout": gpt_dropout}


def batches(name: str, steps: int, size: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """`steps` global batches of `size` samples for a model, the same in every process."""
    g = torch.Generator().manual_seed(17)
    out = []
    for _ in range(steps):
        if name == "mlp":
            x = torch.randn(size, 6, generator=g, dtype=torch.float64).to(dtype)
            y = torch.randint(3, (size,), generator=g)
        elif name == "cnn":
            x = torch.randn(size, 1, 8, 8, generator=g, dtype=torch.float64).to(dtype)
            y = torch.randint(3, (size,), generator=g)
        else:
            x = torch.randint(13, (size, 8), generator=g)
            y = torch.randint(13, (size, 8), generator=g)
        out.append({"x": x, "y": y})
    return out


def shard(batch: Batch, world: int, rank: int) -> Batch:
    """The rows of a global batch that belong to one rank."""
    return {k: v.tensor_split(world)[rank] for k, v in batch.items()}


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


def noise_seed(step: int, rank: int) -> int:
    """The seed a rank sets before a step, so that an oracle can draw the same dropout masks."""
    return 1000 * (step + 1) + rank


def digest(tree: Any) -> str:
    """A hash of the bytes, dtypes and shapes of every leaf."""
    h = hashlib.sha256()
    for leaf in optree.tree_leaves(tree):
        t = leaf.detach().contiguous()
        h.update(f"{t.dtype}{tuple(t.shape)}".encode())
        h.update(t.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()


def same_bits_on_all_ranks(tree: Any) -> bool:
    """Compares every byte of the tree across ranks with a plain all_gather: independent of fdp."""
    leaves = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in optree.tree_leaves(tree)]
    mine = torch.cat(leaves)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return all(torch.equal(mine, part) for part in parts)


def mean_statistics(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BatchNorm's running statistics averaged over ranks; its step counter is equal everywhere as it is."""
    import fdp

    return {k: fdp.pmean(v) if v.is_floating_point() else v for k, v in buffers.items()}


def fdp_step(apply: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """The training step that most tests run: cross entropy, one optimizer, averaged statistics."""
    import fdp

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        def loss_fn(params: Any) -> Any:
            logits, buffers = apply(params, state["buffers"], batch["x"])
            return loss_of(logits, batch), buffers

        (loss, buffers), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        new = {"params": params, "buffers": mean_statistics(buffers), "opt": opt}
        return new, {"loss": fdp.pmean(loss)}

    return train_step


def trained_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    shards: int,
) -> list[float]:
    """The oracle: averages per-shard gradients and statistics in a loop, in plain PyTorch, in place."""
    params, losses = list(model.parameters()), []
    for step, batch in enumerate(data):
        before = {k: v.clone() for k, v in model.named_buffers()}
        grads, after, total = [], [], 0.0
        for rank in range(shards):
            model.load_state_dict(before, strict=False)
            torch.manual_seed(noise_seed(step, rank))
            piece = shard(batch, shards, rank)
            loss = loss_of(model(piece["x"]), piece)
            grads.append(torch.autograd.grad(loss, params))
            after.append({k: v.clone() for k, v in model.named_buffers()})
            total += loss.item() / shards
        for p, *gs in zip(params, *grads, strict=True):
            p.grad = torch.stack(gs).mean(0)
        optimizer.step()
        for k, v in model.named_buffers():
            v.copy_(torch.stack([a[k].double() for a in after]).mean(0).to(v.dtype))
        losses.append(total)
    return losses
