"""The operators that stand for collectives in a traced graph, and their implementation outside of steps.

Each is a raw library operator: the tracer records it as one node and never looks inside. `fdp.collectives.markers` says
how each is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.context.axis import current_axis, send_now
from fdp.distributed.collective import OPERATORS
from fdp.distributed.messages import rows_arriving
from fdp.distributed.other_ranks import OtherRanks
from fdp.errors import FdpError, build_message
from fdp.pytorch.dispatch import without_autograd_kernels

_library = torch.library.Library("fdp", "DEF")
# The tag keeps the fake-tensor mode from running a marker on a constant, which it does for any operator that it
# believes to be a plain function of its inputs: the result would then be one rank's own value.
for _schema in (
    "all_reduce(Tensor x, str op, str axis, str kind, str label, ScalarType? wire=None, ScalarType? accumulate=None) "
    "-> Tensor",
    "all_gather(Tensor x, int size, str axis, str label) -> Tensor",
    "broadcast(Tensor x, int root, str axis, str label) -> Tensor",
    # Of these the first dimension of the argument has an entry for each rank.
    "reduce_scatter(Tensor x, str op, str axis, str kind, str label, ScalarType? accumulate=None) -> Tensor",
    "all_to_all(Tensor x, str axis, str kind, str label) -> Tensor",
    # Sources and destinations, one after the other.
    "permute(Tensor x, int[] pairs, str axis, str kind, str label) -> Tensor",
    "vary(Tensor x, str kind) -> Tensor",
    "axis_index(Tensor like, str axis) -> Tensor",
    "loop_begin(Tensor like, int count) -> Tensor",
    "loop_end(Tensor index) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _sendable(x: torch.Tensor) -> torch.Tensor:
    """The values in the memory layout in which they are sent."""
    return x.contiguous().resolve_conj().resolve_neg()


def _refuse_traced(axis: str) -> None:
    if axis.startswith("traced"):
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
        send_now(label, lambda ranks: ranks.all_reduce(out, op))
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
        send_now(label, lambda ranks: ranks.all_gather(out, _sendable(x)))
    else:
        others.all_gather_(out, x)
    return out


def _broadcast(x: torch.Tensor, root: int, axis: str, label: str) -> torch.Tensor:
    _refuse_traced(axis)
    out = _contiguous_copy(x)
    if not out.numel():
        return out
    if (others := OtherRanks.of_axis(axis)) is None:
        send_now(label, lambda ranks: ranks.broadcast(out, root))
    else:
        others.broadcast_(out, root)
    return out


def _reduce_scatter(x: torch.Tensor, op: str, axis: str, kind: str, label: str, accumulate: Any = None) -> torch.Tensor:
    _refuse_traced(axis)
    if not x.numel():
        return _first_contiguous(x)
    own, out = _contiguous_copy(x), _first_contiguous(x)
    if (others := OtherRanks.of_axis(axis)) is None:
        arriving = own.new_empty((rows_arriving(len(own)), *own.shape[1:]))
        send_now(label, lambda ranks: ranks.reduce_scatter(out, arriving, own, op, accumulate=accumulate))
    else:
        others.reduce_scatter_(out, own, op)
    return out


def _all_to_all(x: torch.Tensor, axis: str, kind: str, label: str) -> torch.Tensor:
    _refuse_traced(axis)
    out = _empty_contiguous(x)
    if not out.numel():
        return out
    if (others := OtherRanks.of_axis(axis)) is None:
        send_now(label, lambda ranks: ranks.all_to_all(out, _sendable(x)))
    else:
        others.all_to_all_(out, x)
    return out


def _permute(x: torch.Tensor, pairs: Sequence[int], axis: str, kind: str, label: str) -> torch.Tensor:
    _refuse_traced(axis)
    out = _empty_contiguous(x)
    if not out.numel():
        return out
    paired = list(zip(pairs[::2], pairs[1::2], strict=True))
    if (others := OtherRanks.of_axis(axis)) is None:
        send_now(label, lambda ranks: ranks.permute(out, _sendable(x), paired))
    else:
        others.permute_(out, x, paired)
    return out


def _axis_index(like: torch.Tensor, axis: str) -> torch.Tensor:
    _refuse_traced(axis)
    others = OtherRanks.of_axis(axis)
    return torch.full((), current_axis().rank if others is None else others.rank, dtype=torch.int64, device="cpu")


def _loop_begin(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def _empty_contiguous(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _first_contiguous(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)


for _name, _real, _fake in (
    ("all_reduce", _all_reduce, _empty_contiguous),
    ("broadcast", _broadcast, _empty_contiguous),
    ("reduce_scatter", _reduce_scatter, _first_contiguous),
    ("all_to_all", _all_to_all, _empty_contiguous),
    ("permute", _permute, _empty_contiguous),
    ("vary", lambda x, kind: _contiguous_copy(x), _empty_contiguous),
    ("all_gather", _all_gather, lambda x, size, axis, label: x.new_empty((size, *x.shape))),
    ("axis_index", _axis_index, lambda like, axis: torch.empty((), dtype=torch.int64, device="cpu")),
    # What is traced between these two runs `count` times; the result of the first is the number of the time.
    ("loop_begin", _loop_begin, _loop_begin),
    ("loop_end", lambda index: torch.empty((), device="cpu"), lambda index: torch.empty((), device="cpu")),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fdp::{_name}", _fake, lib=_library)


def in_forward_mode() -> bool:
    """Whether `torch.func.jvp`, or one of its like, is at work. (This relies on `forward_ad._current_level`.)"""
    return torch.autograd.forward_ad._current_level >= 0


def _without_tangents(name: str) -> Any:
    """The autograd kernel of a marker: refuse a tangent, which would be lost silently.

    The classes of `fdp.collectives.markers` keep tangents from it. Dynamo traces past them, though, where no gradient
    is asked for.
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
        with without_autograd_kernels():
            out: torch.Tensor = marker(x, *rest)
        return out

    return below_autograd


for _name in (*OPERATORS, "vary"):
    _library.impl(_name, _without_tangents(_name), "Autograd")
