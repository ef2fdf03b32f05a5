"""What a type checker knows of steps: `make lint` reads this file, and a test runs it.

A call that is wrong stands under `TYPE_CHECKING` with a `type: ignore`. If its mistake were not found any more, the
checker would report that this is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import fdp


@fdp.data_parallel
def bare(w: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A step that is decorated without options."""
    loss, grad = fdp.value_and_grad(loss_of)(w, batch)
    assert_type(loss, Tensor)
    return w - 0.1 * grad, fdp.pmean(loss)


@fdp.data_parallel(batch_argnums=1, donate_argnums=0)
def with_options(w: Tensor, batch: dict[str, Tensor], lr: float = 0.1) -> Tensor:
    """A step that is decorated with options, and has a default."""
    (loss, right), grad = fdp.value_and_grad(loss_and_more, has_aux=True)(w, batch)
    assert_type(loss, Tensor)
    assert_type(right, int)
    loss, grad = fdp.accumulate(fdp.value_and_grad(loss_of), microbatches=2)(w, batch)
    assert_type(loss, Tensor)
    new: Tensor = w - lr * grad
    return new


class Trainer:
    """Steps that are methods."""

    def __init__(self) -> None:
        self.made = fdp.data_parallel(self.plain, batch_argnums=1)

    @fdp.data_parallel(static_argnums=0)
    def step(self, w: Tensor, batch: dict[str, Tensor]) -> Tensor:
        mean: Tensor = fdp.pmean(batch["x"].mean(0))
        return w - mean

    def plain(self, w: Tensor, batch: dict[str, Tensor]) -> Tensor:
        mean: Tensor = fdp.pmean(batch["x"].mean(0))
        return w + mean


def loss_of(w: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (batch["x"] @ w).square().mean()


def loss_and_more(w: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return loss_of(w, batch), 1


def results() -> list[Any]:
    """Run each of them once, in a world of one."""
    w, batch = torch.tensor([1.0, 2.0]), {"x": torch.ones(4, 2)}
    trainer = Trainer()
    found = bare(w, batch)
    assert_type(found, tuple[Tensor, Tensor])
    assert_type(bare.trace(w, batch), fdp.Trace)
    assert_type(bare.plan(w, batch), fdp.Plan)
    return [
        *found,
        assert_type(trainer.step(w, batch), Tensor),
        assert_type(trainer.made(w, batch), Tensor),
        assert_type(with_options(w, batch, lr=0.5), Tensor),
    ]


if TYPE_CHECKING:
    bare(torch.ones(2))  # type: ignore[call-arg]
    bare(1, {})  # type: ignore[arg-type]
    with_options(torch.ones(2), {}, learning_rate=1.0)  # type: ignore[call-arg]
    Trainer().step(torch.ones(2))  # type: ignore[call-arg]
    fdp.data_parallel(loss_of, donate=0)  # type: ignore[call-overload]
    fdp.value_and_grad(loss_of)(torch.ones(2))  # type: ignore[call-arg]
