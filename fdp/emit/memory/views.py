"""Views that change nothing: `detach`, `t` of `t`, a `view` to the shape that is there already.

In an emitted step nothing is recorded for autograd, so a view with the geometry of the tensor that it looks at can
be replaced by that tensor. Each one costs a call into the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fdp.trace.effects import effects_of


def redundant_views(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """Find, for each view that is geometrically its own base (or its base's base, ...), that base."""
    base_of: dict[fx.Node, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not effects_of(node).view or not isinstance(node.args[0], fx.Node):
            continue
        base = node.args[0]
        if not all(isinstance(each.meta["val"], torch.Tensor) for each in (base, node)):
            continue
        base_of[node] = base
        candidate: fx.Node | None = base
        while candidate is not None:
            if geometry(candidate.meta["val"]) == geometry(node.meta["val"]):
                same[node] = same.get(candidate, candidate)
                break
            candidate = base_of.get(candidate)
    return same


def geometry(value: Any) -> tuple[Any, ...]:
    """How a tensor lies in its memory: two tensors of one memory with the same geometry are the same tensor."""
    return (
        tuple(value.shape),
        tuple(value.stride()),
        value.storage_offset(),
        value.dtype,
        value.is_conj(),
        value.is_neg(),
    )


def has_gaps(value: torch.Tensor) -> bool:
    """Whether there are elements between those of a tensor that are not its own, and none of its own is there twice."""
    if value.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense.default(value):
        return False
    span = 0  # of the dimensions so far, the element that lies last
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride <= span:
            return False  # elements may lie in one place
        span += (size - 1) * stride
    return True
