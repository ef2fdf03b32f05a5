"""`as_strided` in a compiled graph: it indexes a flat copy of the storage, laid out as in the trace.

Inductor chooses the strides of values inside of a graph, and computes transposed, sliced and expanded ones where they
are used. `as_strided` then finds other elements (seen in torch 2.13 to 2.15, with `torch.compile` as well). So it is
applied to a flat copy of the whole storage. Inputs keep their strides, and are indexed directly. `as_strided_scatter`
writes to a copy with the strides of the trace, whatever strides the original gets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import snapshot
from fdp.trace.operators.effects import is_view, whole_of

_aten = torch.ops.aten


def index_flat_copies(graph: fx.Graph) -> None:
    """Let `as_strided` read inputs or flat copies, and `as_strided_scatter` write to copies.

    Branches of conditions are left as they are: they are proved by their text.

    Args:
        graph: functional; changed in place.
    """
    for node in list(graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default)):
        into = node.args[0]
        if into.op == "call_function" and _fills_storage(into.meta["val"]):
            with graph.inserting_before(node):
                node.update_arg(0, _call(graph, snapshot, into, list(into.meta["val"].stride())))
    rows: dict[fx.Node, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=_aten.as_strided.default)):
        value, size, stride, *offset = node.args
        seen = value.meta["val"]
        at = offset[0] if offset and offset[0] is not None else seen.storage_offset()
        whole = whole_of(value)
        if whole.op == "call_function":
            if not _fills_storage(whole.meta["val"]):
                continue  # nothing is known of the storage between its elements
            if whole not in rows:
                with graph.inserting_before(whole.next):
                    rows[whole] = _flat_copy(graph, whole)
            whole = rows[whole]
        node.args = (whole, size, stride, at)
        node.kwargs = {}
    moved: set[fx.Node] = set()
    for node in graph.nodes if rows else ():
        touched = node.target is _aten.as_strided.default or not moved.isdisjoint(node.all_input_nodes)
        if touched and node.op == "call_function" and is_view(node):
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda each: each.meta["val"]), **node.kwargs)
            moved.add(node)


def _fills_storage(value: torch.Tensor) -> bool:
    return value.storage_offset() == 0 and bool(_aten.is_non_overlapping_and_dense.default(value))


def _flat_copy(graph: fx.Graph, whole: fx.Node) -> fx.Node:
    """A flat copy of the storage of a value."""
    value: torch.Tensor = whole.meta["val"]
    turned = _call(graph, _aten.permute.default, whole, _memory_order(value))
    return _call(graph, snapshot, _call(graph, _aten.reshape.default, turned, [value.numel()]))


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a value in memory order, the one with the largest stride first."""
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], -value.shape[dim], dim))


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    made.meta["val"] = target(*values, **named)
    return made
