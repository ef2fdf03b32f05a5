"""Values that are the same at every call of a step: a range of positions, a causal mask, the first gradient, 1."""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.operators.effects import effects_of, storages_of

_LARGEST_BYTES = 2**16
"""Larger constants are computed anew at every call: kept ones take memory as long as the step exists."""

_LIKE = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
"""Operators that read only the shape of a tensor."""


def constant_values(graph: fx.Graph, excluded: AbstractSet[int]) -> dict[fx.Node, torch.Tensor]:
    """Compute the values that depend on no input.

    Args:
        graph: a traced graph.
        excluded: memory that is changed, is returned, or belongs to something else.

    Returns:
        The value of each node that is small and depends on nothing.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        if not _is_repeatable(node) or not excluded.isdisjoint(storages_of(node)):
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not _is_small(value):
            continue
        name = schema_of(node.target).name.removeprefix("aten::")
        args = node.args
        if name in _LIKE:
            if any(isinstance(argument, fx.Node) for argument in args[1:]):
                continue
            shape_of: Any = args[0]
            like = shape_of.meta["val"]
            args = (torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), *args[1:])
        elif any(argument not in found for argument in node.all_input_nodes):
            continue
        with torch.no_grad():
            made = node.target(*fx.map_arg(args, found.__getitem__), **fx.map_arg(node.kwargs, found.__getitem__))
        if isinstance(made, torch.Tensor) and (made.shape, made.dtype, made.device, made.stride()) == (
            value.shape, value.dtype, value.device, value.stride()
        ):  # fmt: skip
            found[node] = made
    return found


def _is_repeatable(node: fx.Node) -> bool:
    """Whether a call computes the same from the same arguments, and does nothing else."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem or not isinstance(target, OpOverload):
        return False
    effects = effects_of(node)
    return target.namespace == "aten" and effects.pure and not effects.uninitialised


def _is_small(value: torch.Tensor) -> bool:
    if value.layout != torch.strided or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return False
    return value.numel() * value.itemsize <= _LARGEST_BYTES
