"""What is measured: models, a batch per rank, and the figures that fdp is meant to reach."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, Gated, perceptron, resnet18
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the batch that each rank gets, the loss, and the targets.

    Attributes:
        name: as on the command line.
        what: for the reader of the table.
        model: builds the model from the current seed.
        batch: draws one rank's batch.
        loss: of the model's output and the batch.
        rounds: turns of each contender unless the command line says otherwise.
        burst: timed steps of a turn.
        waking: steps of a turn before the timed ones. They find the processor's caches as others left them, which a
            training loop of one's own never does; it matters for steps of some milliseconds.
        time_target: fdp's step time is to be at most so much of the best peer's; None where nothing was set.
        memory_target: the same for the peak of memory above the live state.
        compiled_target: the step time of fdp with `compile` is to be at most so much of the best compiled peer's.
        draws: whether the model draws random numbers: contenders draw different ones, and so train apart.
        device: where model and batch live.
        autocast: the dtype that forward and loss are computed in, None for that of the parameters.
    """

    name: str
    what: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[torch.Tensor, Batch], torch.Tensor]
    rounds: int
    burst: int = 1
    waking: int = 0
    time_target: float | None = None
    memory_target: float | None = None
    compiled_target: float | None = None
    draws: bool = False
    device: str = "cpu"
    autocast: torch.dtype | None = None

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context that forward and loss run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast)

    def without_dropout(self) -> Case:
        """The same case, with a model that draws nothing: what all contenders have to train alike."""
        return dataclasses.replace(self, model=lambda: _without_dropout(self.model()), draws=False)


def _without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def _regression(width: int, rows: int) -> Batch:
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}


def _sequences(width: int, rows: int, length: int) -> Batch:
    return {name: torch.randn(rows, length, width) for name in ("x", "y")}


def _pictures(rows: int) -> Batch:
    return {"x": torch.randn(rows, 3, 32, 32), "y": torch.randint(10, (rows,))}


def _text(vocab: int, rows: int, length: int) -> Batch:
    ids = torch.randint(vocab, (rows, length + 1))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def _squared(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.mse_loss(out, batch["y"])


def _class_entropy(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out, batch["y"])


def _token_entropy(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def _mlp(name: str, layers: int, width: int, rows: int, **settings: Any) -> Case:
    return Case(
        name,
        f"MLP, {layers} layers of width {width}, batch {rows} a rank",
        lambda: perceptron(width, layers),
        lambda: _regression(width, rows),
        _squared,
        rounds=30,
        **settings,
    )


_HOST_BOUND = Case(
    "host-bound",
    "GPT, 2 layers of width 64, 1 x 32 bytes a rank",
    lambda: GPT(256, 64, 2, 2, 32),
    lambda: _text(256, 1, 32),
    _token_entropy,
    rounds=60,
    burst=9,
    waking=3,
    time_target=0.60,
)

CPU_CASES = (
    _mlp("deep-narrow", 200, 16, 16, burst=9, waking=3, time_target=0.60),
    _mlp("mlp-20m", 5, 2048, 64, waking=1, time_target=0.90, memory_target=1.0, compiled_target=0.95),
    Case(
        "resnet18",
        "ResNet-18, 8 pictures of 32 x 32 a rank",
        lambda: resnet18(10),
        lambda: _pictures(8),
        _class_entropy,
        rounds=30,
        waking=1,
        time_target=0.97,
        memory_target=1.0,
        compiled_target=0.95,
    ),
    Case(
        "gpt-10m",
        "GPT, 6 layers of width 384, 4 x 128 bytes a rank",
        lambda: GPT(256, 384, 6, 6, 128),
        lambda: _text(256, 4, 128),
        _token_entropy,
        rounds=30,
        time_target=0.99,
        memory_target=1.0,
        compiled_target=0.95,
    ),
    _HOST_BOUND,
)

_POINTWISE = Case(
    "pointwise",
    "transformer, 4 layers of width 64, dropout 0.1, 4 x 1024 vectors a rank",
    lambda: nn.Sequential(*(Gated(64, 4, 32, 0.1) for _ in range(4))),
    lambda: _sequences(64, 4, 1024),
    _squared,
    rounds=30,
    waking=1,
    compiled_target=0.80,
    draws=True,
)

COMPILED_CASES = (*(case for case in CPU_CASES if case.compiled_target is not None), _POINTWISE)

ACCUMULATED_CASES = (
    CPU_CASES[1],
    Case(
        "gpt-10m-16",
        "GPT, 6 layers of width 384, 16 x 128 bytes a rank",
        lambda: GPT(256, 384, 6, 6, 128),
        lambda: _text(256, 16, 128),
        _token_entropy,
        rounds=12,
    ),
)

GPU_CASES = (
    Case(
        "gpt-124m-bf16",
        "GPT, 12 layers of width 768, 8 x 1024 tokens, bfloat16 autocast",
        lambda: GPT(50304, 768, 12, 12, 1024),
        lambda: _text(50304, 8, 1024),
        _token_entropy,
        rounds=30,
        burst=5,
        waking=2,
        compiled_target=0.90,
        device="cuda",
        autocast=torch.bfloat16,
    ),
    dataclasses.replace(_HOST_BOUND, name="host-bound-gpu", time_target=None, compiled_target=0.50, device="cuda"),
)

CASES = {case.name: case for case in (*CPU_CASES, *COMPILED_CASES, *ACCUMULATED_CASES, *GPU_CASES)}
