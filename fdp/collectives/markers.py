"""The marker operators: what a collective looks like in a traced graph, and what it does when it runs.

Each is a raw library operator (the tracer records it as one node and never looks inside) under a
`torch.autograd.Function` with a `vmap` rule. Of the ways to write such an operator this is the one that
survives `grad`, `grad` of `grad`, `vmap`, `make_fx` and Dynamo alike.

Dynamo refuses a Function with a rule for forward mode. So each has its rule in a class of its own, which is taken
where forward mode is on: call the functions at the end, not the classes. All but maxima are linear: the tangent of a
result is the same collective of the tangent.
"""

from __future__ import annotations

from typing import Any

import torch

from fdp.context.axis import current_axis, ranks_for
from fdp.distributed.group import start_all_gather, start_all_reduce, start_broadcast
from fdp.distributed.other_ranks import OtherRanks
from fdp.distributed.wire import Wire
from fdp.errors import FdpError, build_message

_library = torch.library.Library("fdp", "DEF")
# The tag keeps the fake-tensor mode from running a marker on a constant, which it does for any operator that it
# believes to be a plain function of its inputs: the result would then be one rank's own value.
for _schema in (
    "all_reduce(Tensor x, str op, str axis, str kind, str label, ScalarType? wire=None, ScalarType? accumulate=None) "
    "-> Tensor",
    "all_gather(Tensor x, int size, str axis, str label) -> Tensor",
    "broadcast(Tensor x, int root, str axis, str label) -> Tensor",
    "vary(Tensor x, str kind) -> Tensor",
    "axis_index(Tensor like, str axis) -> Tensor",
    "loop_begin(Tensor like, int count) -> Tensor",
    "loop_end(Tensor index) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _refuse_traced(axis: str) -> None:
    if axis == "traced":
        raise FdpError(
            build_message(
                "a collective of a traced step was run by itself.",
                remedy="run what Plan.emit() returns, not the graph of the trace.",
            )
        )


def _all_reduce(
    x: torch.Tensor, op: str, axis: str, kind: str, label: str, wire: Any = None, accumulate: Any = None
) -> torch.Tensor:
    _refuse_traced(axis)
    out = _contiguous_copy(x)
    if not out.numel():
        return out
    if (others := OtherRanks.of_axis(axis)) is None:
        start_all_reduce(out, op, ranks_for(label))()
    elif op == "mean" and out.dtype == torch.float16 and accumulate is None and others.size > 1:
        # As a bucket of such values: divided before it is added up, because two large values have a mean and no sum.
        others.all_reduce_(out.mul_(1 / others.size), op, scaled=True)
    else:
        others.all_reduce_(out, op)
    return out


def _all_gather(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
    _refuse_traced(axis)
    out = torch.empty((size, *x.shape), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if (others := OtherRanks.of_axis(axis)) is None:
        start_all_gather(out, x.contiguous(), ranks_for(label))()
    else:
        others.all_gather_(out, x)
    return out


def _broadcast(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
    _refuse_traced(axis)
    out = _contiguous_copy(x)
    if not out.numel():
        return out
    if (others := OtherRanks.of_axis(axis)) is None:
        start_broadcast(out, root, ranks_for(label))()
    else:
        others.broadcast_(out, root)
    return out


def _axis_index(like: torch.Tensor, axis: str) -> torch.Tensor:
    _refuse_traced(axis)
    others = OtherRanks.of_axis(axis)
    return torch.full((), current_axis().rank if others is None else others.rank, dtype=torch.int64)


def _loop_begin(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def _empty_contiguous(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _name, _real, _fake in (
    ("all_reduce", _all_reduce, _empty_contiguous),
    ("broadcast", _broadcast, _empty_contiguous),
    ("vary", lambda x, kind: _contiguous_copy(x), _empty_contiguous),
    ("all_gather", _all_gather, lambda x, size, axis, label: x.new_empty((size, *x.shape))),
    ("axis_index", _axis_index, lambda like, axis: torch.empty((), dtype=torch.int64)),
    # What is traced between these two runs `count` times; the result of the first is the number of the time.
    ("loop_begin", _loop_begin, _loop_begin),
    ("loop_end", lambda index: torch.empty(()), lambda index: torch.empty(())),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fdp::{_name}", _fake, lib=_library)


def _refuse_extremes(ctx: Any) -> None:
    if ctx.op not in ("sum", "mean"):
        raise FdpError(
            build_message(
                f"{ctx.label} was differentiated, and has no derivative here.",
                remedy="detach its argument, or write the maximum over fdp.all_gather(...).",
            )
        )


def _without_tangents(name: str) -> Any:
    """What a marker does where autograd would look at it: refuse a tangent, which it would lose in silence.

    The classes below keep tangents from it. Dynamo traces past them, though, where no gradient is asked for.
    """
    marker = getattr(torch.ops.fdp, name).default

    def below_autograd(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if in_forward_mode() and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise FdpError(
                build_message(
                    f"fdp.{name} was differentiated forwards under torch.compile, which does not see its derivative.",
                    remedy="call torch.func.jvp and jacfwd in a step under fdp.data_parallel(compile=True), or outside "
                    "of what is compiled.",
                )
            )
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = marker(x, *rest)
        return out

    return below_autograd


for _name in ("all_reduce", "all_gather", "broadcast", "vary"):
    _library.impl(_name, _without_tangents(_name), "Autograd")


class AllReduce(torch.autograd.Function):
    """Sum or mean over ranks, whose transpose is itself; max and min, which have none."""

    @staticmethod
    def forward(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
        return torch.ops.fdp.all_reduce.default(x, op, axis, kind, label)

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


class NarrowMean(torch.autograd.Function):
    """Mean over ranks of what is sent in a narrow dtype and comes back in its own; its transpose is sent as it is."""

    @staticmethod
    def forward(x: torch.Tensor, axis: str, size: int, label: str, wire: Wire) -> torch.Tensor:
        narrow, accumulate = wire.carries(x.dtype), wire.adds_in(x.dtype)
        # Alone, nothing is sent, so nothing is rounded: the marker only says what would be sent.
        sent = x if size == 1 or narrow == x.dtype else x.to(narrow, memory_format=torch.contiguous_format)
        out = torch.ops.fdp.all_reduce.default(sent, "mean", axis, "gradient", label, narrow, accumulate)
        return out.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.axis, _, ctx.label, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad, "mean", ctx.axis, "transpose", ctx.label), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return narrow_mean(x, *rest), in_dims[0]


class AllGather(torch.autograd.Function):
    """Stack every rank's value; the transpose sums what all ranks send back to this one."""

    @staticmethod
    def forward(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
        return torch.ops.fdp.all_gather.default(x, size, axis, label)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.size, ctx.axis, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = all_reduce(grad, "sum", ctx.axis, "transpose", ctx.label)
        return own_entry(summed, ctx.axis), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return all_gather(x.movedim(in_dims[0], 0), *rest), 1


def own_entry(stack: torch.Tensor, axis: str) -> torch.Tensor:
    """This rank's entry of a stack with one for each rank."""
    own = torch.ops.fdp.axis_index.default(torch.empty(()), axis).to(stack.device).reshape(1)
    return stack.index_select(0, own).squeeze(0)


class Broadcast(torch.autograd.Function):
    """Every rank takes the root's value; the transpose gives the root the sum, the others zero."""

    @staticmethod
    def forward(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
        return torch.ops.fdp.broadcast.default(x, root, axis, label)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.root, ctx.axis, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = all_reduce(grad, "sum", ctx.axis, "transpose", ctx.label)
        is_root = torch.ops.fdp.axis_index.default(torch.empty(()), ctx.axis).to(grad.device) == ctx.root
        return torch.where(is_root, summed, torch.zeros_like(summed)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
        return broadcast(x, *rest), in_dims[0]


class Vary(torch.autograd.Function):
    """The same value, taken to differ from rank to rank; kind "per_rank" also says that this is meant."""

    @staticmethod
    def forward(x: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.ops.fdp.vary.default(x, kind)

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


class ForwardNarrowMean(NarrowMean):
    """NarrowMean, in forward mode; the tangent is sent as it is."""

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


class ForwardVary(Vary):
    """Vary, in forward mode."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return vary(tangent, ctx.kind)


def in_forward_mode() -> bool:
    """Whether `torch.func.jvp`, or one of its like, is at work. (This relies on `forward_ad._current_level`.)"""
    return torch.autograd.forward_ad._current_level >= 0


def all_reduce(x: torch.Tensor, op: str, axis: str, kind: str, label: str) -> torch.Tensor:
    """See `AllReduce`."""
    out: torch.Tensor = (ForwardAllReduce if in_forward_mode() else AllReduce).apply(x, op, axis, kind, label)
    return out


def narrow_mean(x: torch.Tensor, axis: str, size: int, label: str, wire: Wire) -> torch.Tensor:
    """See `NarrowMean`."""
    out: torch.Tensor = (ForwardNarrowMean if in_forward_mode() else NarrowMean).apply(x, axis, size, label, wire)
    return out


def all_gather(x: torch.Tensor, size: int, axis: str, label: str) -> torch.Tensor:
    """See `AllGather`."""
    out: torch.Tensor = (ForwardAllGather if in_forward_mode() else AllGather).apply(x, size, axis, label)
    return out


def broadcast(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
    """See `Broadcast`."""
    out: torch.Tensor = (ForwardBroadcast if in_forward_mode() else Broadcast).apply(x, root, axis, label)
    return out


def vary(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `Vary`."""
    out: torch.Tensor = (ForwardVary if in_forward_mode() else Vary).apply(x, kind)
    return out
