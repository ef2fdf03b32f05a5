"""Calls that compute the same bits as the traced ones, for less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.emit.codegen.writer import Writer

_aten = torch.ops.aten


def transposed_weight(writer: Writer, node: fx.Node) -> fx.Node | None:
    """The weight of a linear layer before `t()`, for an operator that takes it as it is: one view less at every
    call."""
    if node.target is not _aten.addmm.default or node.kwargs:
        return None
    bias, rows, columns = (_node(argument) for argument in node.args)
    if columns.target is not _aten.t.default or columns.name in writer.memory.places.named:
        return None
    plain = bias.meta["val"].dim() == 1 and rows.meta["val"].dim() == 2
    weight = _node(columns.args[0])
    return weight if plain and columns not in writer.memory.same else None


def scalars_added(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """A cheaper call that adds a number to many scalars, such as the step counts of an optimizer.

    On a CPU `_foreach_add_` makes a tensor of the number for each of them, which takes three times as long as to add.
    """
    if target is not _aten._foreach_add_.Scalar or kwargs or len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    tensors, number = args
    values = [tensor.meta["val"] for tensor in tensors]
    first = values[0]
    if any(v.dim() or v.dtype != first.dtype or v.device.type != "cpu" for v in values) or first.is_complex():
        return None
    one = torch.tensor(number, dtype=first.dtype, device="cpu")
    if isinstance(number, bool) or one.item() != number:
        return None  # the number would be rounded in another way
    return _aten._foreach_add_.List, [tensors, [one] * len(tensors)], {}


def _node(argument: object) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument
