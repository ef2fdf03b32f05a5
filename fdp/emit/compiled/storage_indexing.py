"""Values that are read by their places in memory, as `as_strided` does, lie there as in the trace.

Inductor lays values inside of a graph out as it sees fit, and computes transposed, cut and repeated ones where they are
used. What looks at places then finds other elements (seen in torch 2.13 to 2.15, with `torch.compile` as well). So it
looks at a copy of the whole memory, as a row. Inputs lie where they lie. What writes to places writes to a copy that
lies as in the trace, whatever becomes of the strides of what is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import snapshot
from fdp.trace.operators.effects import is_view, whole_of

_aten = torch.ops.aten


def index_flat_copies(graph: fx.Graph) -> None:
    """Let what looks at places look at inputs, or at rows, and what writes to places write to copies.

    Branches of conditions are left as they are: they are proved by their text.

    Args:
        graph: functional; changed in place.
    """
    for node in list(graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default)):
        into = node.args[0]
        if into.op == "call_function" and _fills_memory(into.meta["val"]):
            with graph.inserting_before(node):
                node.update_arg(0, _call(graph, snapshot, into, list(into.meta["val"].stride())))
    rows: dict[fx.Node, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=_aten.as_strided.default)):
        value, size, stride, *offset = node.args
        seen = value.meta["val"]
        place = offset[0] if offset and offset[0] is not None else seen.storage_offset()
        whole = whole_of(value)
        if whole.op == "call_function":
            if not _fills_memory(whole.meta["val"]):
                continue  # of what lies between its elements nothing is known
            if whole not in rows:
                with graph.inserting_before(whole.next):
                    rows[whole] = _row(graph, whole)
            whole = rows[whole]
        node.args = (whole, size, stride, place)
        node.kwargs = {}
    moved: set[fx.Node] = set()
    for node in graph.nodes if rows else ():
        touched = node.target is _aten.as_strided.default or not moved.isdisjoint(node.all_input_nodes)
        if touched and node.op == "call_function" and is_view(node):
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda each: each.meta["val"]), **node.kwargs)
            moved.add(node)


def _fills_memory(value: torch.Tensor) -> bool:
    return value.storage_offset() == 0 and bool(_aten.is_non_overlapping_and_dense.default(value))


def _row(graph: fx.Graph, whole: fx.Node) -> fx.Node:
    """A copy of the memory of a value, as one row."""
    value: torch.Tensor = whole.meta["val"]
    turned = _call(graph, _aten.permute.default, whole, _order(value))
    return _call(graph, snapshot, _call(graph, _aten.reshape.default, turned, [value.numel()]))


def _order(value: torch.Tensor) -> list[int]:
    """The dimensions of a value in the order in which it lies, the one with the largest steps first."""
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], -value.shape[dim], dim))


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    made.meta["val"] = target(*values, **named)
    return made
