"""Conversions between values that are equal on every rank and values that are each rank's own, with their transposes.

If a value is equal on all ranks, its gradient is equal too, and need not be summed: after the `AllGather` of
`fdp.collectives.markers` and a function of what it gathered, the message backward would be as large as all that was
gathered.
"""

from __future__ import annotations

from typing import Any

import torch


def own_entry(stack: torch.Tensor, axis: str) -> torch.Tensor:
    """This rank's entry of a stack with one for each rank."""
    own = torch.ops.fdp.axis_index.default(torch.empty((), device="cpu"), axis).to(stack.device).reshape(1)
    return stack.index_select(0, own).squeeze(0)


class _Transposed(torch.autograd.Function):
    """A function whose transpose gets the same arguments, except the value."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.rest = inputs[1:]


class StackRanks(_Transposed):
    """Stack every rank's value, for a result that goes on through `Spread` alone; its transpose is `Own`."""

    @staticmethod
    def forward(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.all_gather.default(x, size, axis, label)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Own.apply(grad, *ctx.rest), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return StackRanks.apply(x.movedim(in_dims[0], 0), *rest), 1


class Own(_Transposed):
    """This rank's entry of a stack that is equal on every rank; its transpose is `StackRanks`."""

    @staticmethod
    def forward(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
        return own_entry(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return StackRanks.apply(grad, *ctx.rest), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return Own.apply(x.movedim(in_dims[0], 1), *rest), 0


class Spread(_Transposed):
    """The same value, from here on used by each rank for its own; its transpose is `Collect`."""

    @staticmethod
    def forward(x: torch.Tensor, axis: str, label: str) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Collect.apply(grad, *ctx.rest), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return Spread.apply(x, *rest), in_dims[0]


class Collect(_Transposed):
    """The sum over ranks of what each sends back, for a result that goes on through `Spread` alone."""

    @staticmethod
    def forward(x: torch.Tensor, axis: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.all_reduce.default(x, "sum", axis, "transpose", label)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Spread.apply(grad, *ctx.rest), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return Collect.apply(x, *rest), in_dims[0]
