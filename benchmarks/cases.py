"""What is measured: three models, a batch per rank, and one training step of each under DDP and under fdp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fdp

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}


class Block(nn.Module):
    """Pre-norm attention and a four times wider perceptron (GPT-2's block, without dropout)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder over bytes whose output layer is its token embedding."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def _perceptron(width: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _regression(width: int, rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}


def _text(vocab: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocab, (rows, length + 1))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the batch that each rank gets, and the loss.

    Attributes:
        name: as on the command line.
        what: for the reader of the table.
        model: builds the model from the current seed.
        batch: draws one rank's batch.
        loss: of the model's output and the batch.
        steps: timed steps of each contender unless the command line says otherwise.
    """

    name: str
    what: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    loss: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
    steps: int


def _squared(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(out, batch["y"])


def _entropy(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


CASES = {
    case.name: case
    for case in (
        Case(
            "deep-narrow",
            "MLP, 200 layers of width 16, batch 16 a rank",
            lambda: _perceptron(16, 200),
            lambda: _regression(16, 16),
            _squared,
            steps=120,
        ),
        Case(
            "mlp-20m",
            "MLP, 5 layers of width 2048, batch 64 a rank",
            lambda: _perceptron(2048, 5),
            lambda: _regression(2048, 64),
            _squared,
            steps=30,
        ),
        Case(
            "gpt-10m",
            "GPT, 6 layers of width 384, 4 x 128 bytes a rank",
            lambda: GPT(256, 384, 6, 6, 128),
            lambda: _text(256, 4, 128),
            _entropy,
            steps=20,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training loop in progress.

    Attributes:
        step: runs the next training step.
        state_bytes: the size of what has to live from one step to the next: parameters, buffers and the
            optimizer's state, each counted once.
    """

    step: Callable[[], None]
    state_bytes: Callable[[], int]


def _size_bytes(tree: Any) -> int:
    storages = {}
    for leaf in optree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _batches(case: Case) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(100 + dist.get_rank())
    return [case.batch() for _ in range(4)]


def ddp(case: Case) -> Contender:
    """DistributedDataParallel at its default settings (buckets of 1 MiB, then 25 MiB)."""
    return _ddp(case)


def ddp_views(case: Case) -> Contender:
    """DistributedDataParallel with gradient_as_bucket_view=True, otherwise at its default settings."""
    return _ddp(case, gradient_as_bucket_view=True)


def _ddp(case: Case, **options: Any) -> Contender:
    torch.manual_seed(0)
    model = DistributedDataParallel(case.model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    batches, count = _batches(case), 0

    def step() -> None:
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        case.loss(model(batch["x"]), batch).backward()
        optimizer.step()

    def state_bytes() -> int:
        return _size_bytes([list(model.parameters()), list(model.buffers()), dict(optimizer.state_dict()["state"])])

    return Contender(step, state_bytes)


def fdp_step(case: Case) -> Contender:
    """The same step under fdp.data_parallel with the state donated; it also averages the loss over ranks."""
    torch.manual_seed(0)
    apply, params, buffers = fdp.from_module(case.model())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **ADAMW)
    batches, count = _batches(case), 0

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: dict[str, torch.Tensor]) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return case.loss(apply(params, state["buffers"], batch["x"])[0], batch)

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": state["buffers"], "opt": opt}, fdp.pmean(loss)

    state: Any = fdp.replicate({"params": params, "buffers": buffers, "opt": optimizer.init(params)})
    del params, buffers

    def step() -> None:
        nonlocal count, state
        batch = batches[count % len(batches)]
        count += 1
        state, _ = train_step(state, batch)

    return Contender(step, lambda: _size_bytes(state))


CONTENDERS: dict[str, Callable[[Case], Contender]] = {"ddp": ddp, "ddp-views": ddp_views, "fdp": fdp_step}
