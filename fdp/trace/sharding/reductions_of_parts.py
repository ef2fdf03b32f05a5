"""Reductions of a divided tensor along its parts: each rank reduces its own, and ranks combine what they get."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fdp.state.shards import Part
from fdp.trace.operators.effects import bound_arguments, operator_name
from fdp.trace.sharding.inserted import Link

_aten = torch.ops.aten

New = Callable[..., fx.Node]
"""Puts a call of an operator into a graph."""

OverRanks = Callable[[fx.Node, str], fx.Node]
"""Puts a collective into a graph: of what each rank has, by "sum", "max" or "min"."""


def combined(
    node: fx.Node, own: fx.Node, part: Part, entry: int | None, axis: str, new: New
) -> tuple[fx.Node, list[Link]]:
    """Combine what ranks have made of their parts.

    Args:
        node: the operator on the whole tensor.
        own: what it made of this rank's part.
        part: how the tensor is divided.
        entry: which entry of the operator's lists it is; None if it has none.
        axis: of the ranks, as markers name it.
        new: see `New`.

    Returns:
        The node of what the operator makes of the whole tensor; and for what messages were put in.
    """
    sent: list[fx.Node] = []
    label = f"{operator_name(node).removeprefix('_foreach_')} of parts at {node.meta.get('source')}"

    def over_ranks(value: fx.Node, op: str) -> fx.Node:
        sent.append(new(torch.ops.fdp.all_reduce.default, value, op, axis, "value", label))
        return sent[-1]

    made = _combined(node, own, part.ranks, new, over_ranks)
    of = node.name, "combined", made.name, node.name, part, label, entry, own.name
    return made, [Link(each.name, *of) for each in sent]


def _combined(node: fx.Node, own: fx.Node, ranks: int, new: New, over_ranks: OverRanks) -> fx.Node:
    name = operator_name(node)
    if name in ("_foreach_norm", "linalg_vector_norm"):
        return _norm(own, _order(node), new, over_ranks)
    if name in ("all", "any"):
        number = new(_aten._to_copy.default, own, dtype=torch.int32)
        found = over_ranks(number, "min" if name == "all" else "max")
        return new(_aten._to_copy.default, new(_aten.ne.Scalar, found, 0), dtype=own.meta["val"].dtype)
    if name in ("amax", "max", "amin", "min"):
        return _extreme(own, name.removeprefix("a"), new, over_ranks)
    if name == "mean":
        return new(_aten.div.Scalar, over_ranks(own, "sum"), ranks)
    return over_ranks(own, "sum")


def _extreme(own: fx.Node, op: str, new: New, over_ranks: OverRanks) -> fx.Node:
    """The largest or least number; NaN if any is. Backends compare with <, which loses a NaN: it is sent beside."""
    dtype = own.meta["val"].dtype
    if not dtype.is_floating_point:
        return over_ranks(own, op)
    is_nan = new(_aten.isnan.default, own)
    lost = over_ranks(new(_aten._to_copy.default, is_nan, dtype=dtype), "max")
    worst = new(_aten.masked_fill.Scalar, own, is_nan, -math.inf if op == "max" else math.inf)
    found = over_ranks(worst, op)
    return new(_aten.masked_fill.Scalar, found, new(_aten.gt.Scalar, lost, 0), math.nan)


def _norm(own: fx.Node, order: float, new: New, over_ranks: OverRanks) -> fx.Node:
    if math.isinf(order):
        return _extreme(own, "max" if order > 0 else "min", new, over_ranks)
    if order in (0, 1):
        return over_ranks(own, "sum")
    dtype = own.meta["val"].dtype
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if is_narrow:  # a power of it may be too large for that
        own = new(_aten._to_copy.default, own, dtype=torch.float32)
    if order == 2:
        found = new(_aten.sqrt.default, over_ranks(new(_aten.mul.Tensor, own, own), "sum"))
    else:
        power = over_ranks(new(_aten.pow.Tensor_Scalar, own, order), "sum")
        found = new(_aten.pow.Tensor_Scalar, power, 1 / order)
    return new(_aten._to_copy.default, found, dtype=dtype) if is_narrow else found


def _order(node: fx.Node) -> float:
    """Which norm it is."""
    given: dict[str, Any] = {argument.name: value for argument, value in bound_arguments(node)}
    return float(given.get("ord", 2))
