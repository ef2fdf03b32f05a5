"""Which values of a traced step are equal on every rank, and where the others began to differ.

The rule is one: a result varies if anything that its operation reads varies. Batch arguments and random
numbers vary to begin with; the result of a collective does not, unless it gives each rank a part of its own. Since
operators may write in place, what varies is memory, at a moment of the program.

On a mesh of several dimensions a value varies along some of them: a collective along one dimension makes it equal along
that one, and a value that varies along none is equal on every rank.

References: JAX, the varying manual axes of `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fdp.distributed.mesh import WHOLE, Dimensions
from fdp.trace.operators.effects import collective_of, effects_of, is_marker, mesh_dimension_of, storages_of


@dataclass(frozen=True)
class Cause:
    """Why a value may differ from rank to rank.

    Attributes:
        last: the node by which it last came to vary: an operation, or the placeholder itself.
        draw: the operator that drew random numbers, if they are all that makes it differ.
        along: the dimensions of the mesh along which it may differ.
    """

    last: fx.Node
    draw: fx.Node | None
    along: frozenset[str]


def varying_nodes(
    graph: fx.Graph,
    varying_inputs: Iterable[fx.Node],
    dimensions: Dimensions = (),
    after: fx.Node | None = None,
) -> Mapping[fx.Node, Cause]:
    """Find the values that may differ from rank to rank at the end of the step, or when an operator has run.

    Args:
        graph: a traced graph.
        varying_inputs: the placeholders that differ from rank to rank.
        dimensions: of the mesh.
        after: the operator; a placeholder stands for the beginning, and None for the end.

    Returns:
        For each node whose memory varies then: why.
    """
    causes, _ = _walk(graph, varying_inputs, dimensions, after)
    return {
        node: causes[storage]
        for node in graph.nodes
        if node.op != "output"
        for storage in storages_of(node)
        if storage in causes
    }


def ever_varying(graph: fx.Graph, varying_inputs: Iterable[fx.Node], dimensions: Dimensions = ()) -> frozenset[int]:
    """The memory that may differ from rank to rank at any moment of the step.

    Args:
        graph: a traced graph.
        varying_inputs: the placeholders that differ from rank to rank.
        dimensions: of the mesh.
    """
    _, ever = _walk(graph, varying_inputs, dimensions)
    return ever


def _walk(
    graph: fx.Graph, varying_inputs: Iterable[fx.Node], dimensions: Dimensions, after: fx.Node | None = None
) -> tuple[dict[int, Cause], frozenset[int]]:
    """The memory that varies after an operator, or at the end, with causes; and that which varies at any moment."""
    everywhere = frozenset(name for name, _ in dimensions) or frozenset({WHOLE})
    causes: dict[int, Cause] = {}
    ever: set[int] = set()
    for node in varying_inputs:
        for storage in storages_of(node):
            causes[storage] = Cause(node, None, everywhere)
    uneven = _uneven(graph, varying_inputs)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if after is not None:
        nodes = nodes[: nodes.index(after) + 1] if after.op != "placeholder" else []
    for node in nodes:
        if node.op != "call_function":
            continue
        effects = effects_of(node)
        if effects.view:
            continue
        made = set(storages_of(node))
        if is_marker(node):
            if across := _varies_after(node, causes, everywhere):
                for storage in made:
                    causes[storage] = Cause(node, None, across)
            continue
        shape_alone = _only_shape(node) and (node.args[0] not in uneven or _is_scalar(node.args[0]))
        read = (storage for argument in effects.reads if not shape_alone for storage in storages_of(argument))
        found = [causes[storage] for storage in read if storage in causes]
        draws = [cause.draw for cause in found]
        varies = effects.random or bool(found)
        across = everywhere if effects.random else frozenset().union(*(cause.along for cause in found))
        written = {storage for target in effects.writes for storage in storages_of(target)}
        replaced = effects.overwrites and _covers(effects.writes)
        for storage in made | written:
            if varies:
                before = [causes[storage]] if storage in causes and not replaced else []
                reasons = [*(cause.draw for cause in before), *draws]
                draw = None if None in reasons else next(iter(reasons), node)
                causes[storage] = Cause(node, draw, across.union(*(cause.along for cause in before)))
            elif replaced and causes.pop(storage, None) is not None:
                ever.add(storage)
    return causes, frozenset(ever | set(causes))


def _varies_after(node: fx.Node, causes: Mapping[int, Cause], everywhere: frozenset[str]) -> frozenset[str]:
    """The dimensions along which the result of a marker may differ."""
    if is_marker(node, "vary"):
        return everywhere
    collective = collective_of(node)
    if collective is None and not is_marker(node, "axis_index"):
        return frozenset()
    dimension = mesh_dimension_of(node)
    over = frozenset({dimension}) if dimension else everywhere
    if collective is None:
        return over
    own = (causes[storage].along for storage in storages_of(node.all_input_nodes[0]) if storage in causes)
    before: frozenset[str] = frozenset().union(*own)
    return before | over if collective.varies else before - over


def _only_shape(node: fx.Node) -> bool:
    """Whether a node looks only at the shape of its argument."""
    return str(node.target) in ("aten.ones_like.default", "aten.zeros_like.default")


def _uneven(graph: fx.Graph, varying_inputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The values whose shapes may differ from rank to rank: batches, and what is computed from them.

    What is written in place keeps its shape, whatever is written; what comes of a collective has one on all ranks. A
    scalar counts as well: it may be expanded to the length of a batch.
    """
    uneven = set(varying_inputs)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("val") is None or collective_of(node) is not None:
            continue
        effects = effects_of(node)
        sources = effects.writes or node.all_input_nodes
        if any(source in uneven for source in sources):
            uneven.add(node)
    return frozenset(uneven)


def _is_scalar(node: fx.Node) -> bool:
    """Whether a node is a tensor without dimensions, which has the same shape on every rank."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _covers(writes: Iterable[fx.Node]) -> bool:
    """Whether the written tensors cover all of their memory."""
    return all(_is_whole(write.meta["val"]) for write in writes)


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a tensor has each byte of its storage as an element exactly once.

    As many elements as there are in memory are not enough: windows that overlap leave others out.
    """
    size_bytes = value.numel() * value.element_size()
    return size_bytes == value.untyped_storage().nbytes() and bool(
        torch.ops.aten.is_non_overlapping_and_dense.default(value)
    )
