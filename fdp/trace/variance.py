"""Which values of a traced step are equal on every rank, and where the others began to differ.

The rule is one: a result varies if anything that its operation reads varies. Batch arguments and random
numbers vary to begin with; the result of a collective does not. Since operators may write in place, what varies is
memory, at a moment of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fdp.trace.effects import effects_of, is_marker, storages_of


def varying_nodes(graph: fx.Graph, varying_inputs: Iterable[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """Find the values that may differ from rank to rank at the end of the step.

    Args:
        graph: a traced graph.
        varying_inputs: the placeholders that differ from rank to rank.

    Returns:
        For each node whose memory varies at the end: the node by which it last came to vary (an operation, or
        the placeholder itself).
    """
    origin: dict[int, fx.Node] = {}
    for node in varying_inputs:
        for storage in storages_of(node):
            origin[storage] = node
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in nodes:
        if node.op != "call_function":
            continue
        effects = effects_of(node)
        if effects.view:
            continue
        made = set(storages_of(node))
        if is_marker(node):
            if is_marker(node, "vary", "axis_index"):
                for storage in made:
                    origin[storage] = node
            continue
        varies = effects.random or any(
            storage in origin for read in effects.reads if not _only_shape(node) for storage in storages_of(read)
        )
        written = {storage for target in effects.writes for storage in storages_of(target)}
        for storage in made | written:
            if varies:
                origin[storage] = node
            elif effects.overwrites and _covers(effects.writes):
                origin.pop(storage, None)
    return {
        node: origin[storage]
        for node in graph.nodes
        if node.op != "output"
        for storage in storages_of(node)
        if storage in origin
    }


def _only_shape(node: fx.Node) -> bool:
    """Whether a node looks only at the shape of its argument, and at one that cannot differ between ranks."""
    target = str(node.target)
    return target in ("aten.ones_like.default", "aten.zeros_like.default") and node.meta["val"].dim() == 0


def _covers(writes: Iterable[fx.Node]) -> bool:
    """Whether the written tensors are all of their memory."""
    return all(
        write.meta["val"].numel() * write.meta["val"].element_size() == write.meta["val"].untyped_storage().nbytes()
        for write in writes
    )
