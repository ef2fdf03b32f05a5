"""Cast each gradient to the wire dtype as soon as it has been computed.

The user's program casts gradients when the whole backward pass is over. A bucket that waited for that would not overlap
with it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fdp.trace.graph.loops import regions_of
from fdp.trace.operators.effects import effects_of, is_marker, storages_of


def cast_early(graph: fx.Graph) -> None:
    """Move each cast to the wire dtype right behind the operator that computes, or last changes, the gradient.

    What was made in a loop, and never changed after it, is cast behind the loop: the loop runs many times.

    Args:
        graph: a traced graph; its order is changed.
    """
    casts: list[Any] = [node.args[0] for node in graph.nodes if is_marker(node, "all_reduce") and is_wire_cast(node)]
    if not casts:
        return
    writers: dict[int, list[fx.Node]] = {}
    order: dict[fx.Node, int] = {}
    ends = {node: end for _, region, end in regions_of(graph) for node in region}
    for index, node in enumerate(graph.nodes):
        order[node] = index
        if node.op == "call_function":
            for changed in effects_of(node).writes:
                for storage in storages_of(changed):
                    writers.setdefault(storage, []).append(node)
    for cast in casts:
        source = cast.args[0]
        behind = [w for storage in storages_of(source) for w in writers.get(storage, ()) if order[w] < order[cast]]
        behind.append(source)
        last = max(behind, key=order.__getitem__)
        last = ends.get(last, last)
        if last.op == "call_function":
            last.append(cast)
            cast.meta["backward"], cast.meta["source"] = last.meta.get("backward"), last.meta.get("source")


def is_wire_cast(marker: fx.Node) -> bool:
    """Whether a marker sends a gradient that was cast to the wire dtype."""
    source: Any = marker.args[0]
    wire = marker.args[5] if len(marker.args) > 5 else None
    return (
        wire is not None
        and str(source.target) == "aten._to_copy.default"
        and source.meta["val"].dtype == wire
        and source.args[0].meta["val"].dtype != wire
    )
