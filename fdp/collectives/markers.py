"""The markers: operators that stand for collectives in a traced graph, and how they are differentiated.

Each is a raw library operator (`fdp.collectives.operators`) under a `torch.autograd.Function` with a `vmap` rule. Of
the ways to write such an operator this is the one that survives `grad`, `grad` of `grad`, `vmap`, `make_fx` and Dynamo
alike.

Dynamo refuses a Function with a rule for forward mode. So each has its rule in a class of its own, which is taken
where forward mode is on: call the functions at the end, not the classes. All but maxima are linear: the tangent of a
result is the same collective of the tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.collectives.operators import in_forward_mode
from fdp.distributed.wire import Wire
from fdp.errors import FdpError, build_message


def _refuse_extremes(ctx: Any) -> None:
    if ctx.op not in ("sum", "mean"):
        raise FdpError(
            build_message(
                f"{ctx.label} was differentiated, and has no derivative here.",
                remedy="detach its argument, or write the maximum over fdp.all_gather(...).",
            )
        )


class AllReduce(torch.autograd.Function):
    """Sum and mean over ranks, whose transpose is itself; max and min, which have no transpose."""

    @staticmethod
    def forward(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.all_reduce.default(x, op, axis, kind, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.op, ctx.axis, _, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_extremes(ctx)
        return all_reduce(grad, ctx.op, ctx.axis, "transpose", ctx.label), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: str) -> tuple[torch.Tensor, Any]:
        return all_reduce(x, *rest), in_dims[0]


class WireMean(torch.autograd.Function):
    """Mean over ranks in the wire dtype; the result has its own dtype, and the transpose is sent uncast."""

    @staticmethod
    def forward(x: torch.Tensor, axis: str, size: int, label: str, wire: Wire) -> torch.Tensor:
        narrow, accumulate = wire.carries(x.dtype), wire.adds_in(x.dtype)
        # Alone, nothing is sent, so nothing is rounded: the marker only says what would be sent.
        sent = x if size == 1 or narrow == x.dtype else x.to(narrow, memory_format=torch.contiguous_format)
        out = torch.ops.fdp.all_reduce.default(sent, "mean", axis, "gradient", label, narrow, accumulate)
        result: torch.Tensor = out.to(x.dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.axis, _, ctx.label, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad, "mean", ctx.axis, "transpose", ctx.label), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return wire_mean(x, *rest), in_dims[0]


class AllGather(torch.autograd.Function):
    """Stack every rank's value; the transpose sums what all ranks send back to this one: a reduce-scatter."""

    @staticmethod
    def forward(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.all_gather.default(x, size, axis, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.size, ctx.axis, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return reduce_scatter(grad, "sum", ctx.axis, "transpose", ctx.label), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return all_gather(x.movedim(in_dims[0], 0), *rest), 1


class Broadcast(torch.autograd.Function):
    """Every rank takes the root's value; the transpose gives the root the sum, the others zero."""

    @staticmethod
    def forward(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.broadcast.default(x, root, axis, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.root, ctx.axis, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = all_reduce(grad, "sum", ctx.axis, "transpose", ctx.label)
        is_root = torch.ops.fdp.axis_index.default(torch.empty((), device="cpu"), ctx.axis).to(grad.device) == ctx.root
        return torch.where(is_root, summed, torch.zeros_like(summed)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return broadcast(x, *rest), in_dims[0]


class ReduceScatter(torch.autograd.Function):
    """Sum or mean over ranks of this rank's entry; the transpose of the sum stacks what all ranks send back."""

    @staticmethod
    def forward(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.reduce_scatter.default(x, op, axis, kind, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.op, ctx.axis, _, ctx.label = inputs
        ctx.size = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.op == "mean":
            grad = grad / ctx.size
        return all_gather(grad, ctx.size, ctx.axis, ctx.label), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: str) -> tuple[torch.Tensor, Any]:
        return reduce_scatter(x.movedim(in_dims[0], 1), *rest), 0


class AllToAll(torch.autograd.Function):
    """Entry r of the result is rank r's entry for this rank; the transpose is itself."""

    @staticmethod
    def forward(x: torch.Tensor, axis: str, kind: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.all_to_all.default(x, axis, kind, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.axis, _, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_to_all(grad, ctx.axis, "transpose", ctx.label), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: str) -> tuple[torch.Tensor, Any]:
        return all_to_all(x.movedim(in_dims[0], 1), *rest), 1


class Permute(torch.autograd.Function):
    """Each rank sends its value to one, or to none; the transpose sends it back."""

    @staticmethod
    def forward(x: torch.Tensor, pairs: Sequence[int], axis: str, kind: str, label: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.permute.default(x, pairs, axis, kind, label)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.pairs, ctx.axis, _, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = [ctx.pairs[at ^ 1] for at in range(len(ctx.pairs))]
        return permute(grad, back, ctx.axis, "transpose", ctx.label), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return permute(x, *rest), in_dims[0]


class Vary(torch.autograd.Function):
    """The same value, marked as varying; kind "per_rank" also declares it."""

    @staticmethod
    def forward(x: torch.Tensor, kind: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fdp.vary.default(x, kind)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.kind = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, kind: str) -> tuple[torch.Tensor, Any]:
        return vary(x, kind), in_dims[0]


class ForwardAllReduce(AllReduce):
    """AllReduce, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        _refuse_extremes(ctx)
        return all_reduce(tangent, ctx.op, ctx.axis, "tangent", ctx.label)


class ForwardWireMean(WireMean):
    """WireMean, in forward mode; the tangent is sent as it is."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return all_reduce(tangent, "mean", ctx.axis, "tangent", ctx.label)


class ForwardAllGather(AllGather):
    """AllGather, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return all_gather(tangent, ctx.size, ctx.axis, ctx.label)


class ForwardBroadcast(Broadcast):
    """Broadcast, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return broadcast(tangent, ctx.root, ctx.axis, ctx.label)


class ForwardReduceScatter(ReduceScatter):
    """ReduceScatter, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return reduce_scatter(tangent, ctx.op, ctx.axis, "tangent", ctx.label)


class ForwardAllToAll(AllToAll):
    """AllToAll, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return all_to_all(tangent, ctx.axis, "tangent", ctx.label)


class ForwardPermute(Permute):
    """Permute, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return permute(tangent, ctx.pairs, ctx.axis, "tangent", ctx.label)


class ForwardVary(Vary):
    """Vary, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return vary(tangent, ctx.kind)


def all_reduce(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
    """See `AllReduce`."""
    out: torch.Tensor = (ForwardAllReduce if in_forward_mode() else AllReduce).apply(x, op, axis, kind, label)
    return out


def wire_mean(x: torch.Tensor, axis: str, size: int, label: str, wire: Wire) -> torch.Tensor:
    """See `WireMean`."""
    out: torch.Tensor = (ForwardWireMean if in_forward_mode() else WireMean).apply(x, axis, size, label, wire)
    return out


def all_gather(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
    """See `AllGather`."""
    out: torch.Tensor = (ForwardAllGather if in_forward_mode() else AllGather).apply(x, size, axis, label)
    return out


def broadcast(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
    """See `Broadcast`."""
    out: torch.Tensor = (ForwardBroadcast if in_forward_mode() else Broadcast).apply(x, root, axis, label)
    return out


def reduce_scatter(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
    """See `ReduceScatter`. Complex values are sent as pairs of real ones, which every backend can add."""
    if x.is_complex():
        pairs = reduce_scatter(torch.view_as_real(x.resolve_conj()), op, axis, kind, label)
        return torch.view_as_complex(pairs)
    function = ForwardReduceScatter if in_forward_mode() else ReduceScatter
    out: torch.Tensor = function.apply(x, op, axis, kind, label)
    return out


def all_to_all(x: torch.Tensor, axis: str, kind: str, label: str) -> torch.Tensor:
    """See `AllToAll`."""
    out: torch.Tensor = (ForwardAllToAll if in_forward_mode() else AllToAll).apply(x, axis, kind, label)
    return out


def permute(x: torch.Tensor, pairs: Sequence[int], axis: str, kind: str, label: str) -> torch.Tensor:
    """See `Permute`."""
    out: torch.Tensor = (ForwardPermute if in_forward_mode() else Permute).apply(x, pairs, axis, kind, label)
    return out


def vary(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `Vary`."""
    out: torch.Tensor = (ForwardVary if in_forward_mode() else Vary).apply(x, kind)
    return out
