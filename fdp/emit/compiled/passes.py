"""From a functional graph to the one that a compiler gets: effects declared, each where the plan wants it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import DECLARED, FUSED, copy_into, declare_effects, multiply_into, snapshot
from fdp.emit.views import geometry
from fdp.trace.effects import bound_arguments, storages_of

_aten = torch.ops.aten
_HIDDEN = frozenset(FUSED.values())


def declare(graph: fx.Graph, multiply: bool) -> None:
    """Say in a functional graph what changes memory, and when.

    Args:
        graph: changed in place.
        multiply: whether products are computed right in their buckets, by the library's kernel.
    """
    graph.eliminate_dead_code()
    _keep_snapshots(graph)
    _copy_early(graph)
    if multiply:
        _multiply_into_slots(graph)
    declare_effects(graph)


def _changed(graph: fx.Graph) -> set[int]:
    """Memory that is changed while the graph runs."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.target in _HIDDEN:
            declared = DECLARED[node.target]._schema.arguments
            for argument, (_, value) in zip(declared, bound_arguments(node), strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found.update(number for item in value for number in storages_of(item))
        elif node.target in (copy_into, _aten.copy_.default):
            found.update(storages_of(node.args[0]))
    return found


def _keep_snapshots(graph: fx.Graph) -> None:
    """Make copies of what is changed for good: a compiler takes a copy with the same strides for its original."""
    changed = _changed(graph)
    for node in graph.find_nodes(op="call_function", target=_aten.clone.default):
        source: Any = node.args[0]
        same = geometry(source.meta["val"])[:2] == geometry(node.meta["val"])[:2]
        if same and changed.intersection((*storages_of(node), *storages_of(source))):
            node.target, node.args, node.kwargs = snapshot, (source,), {}


def _multiply_into_slots(graph: fx.Graph) -> None:
    """Compute a product right in its bucket, if nobody else reads it."""
    for node in graph.find_nodes(op="call_function", target=copy_into):
        slot, value = node.args
        factor = 1.0
        if value.target is _aten.mul.Tensor and isinstance(value.args[1], float) and len(value.users) == 1:
            factor, value = value.args[1], value.args[0]
        product = value
        while product.op == "call_function" and product.target in _VIEWS and len(product.users) == 1:
            product = product.args[0]
        if (
            product.target is _aten.mm.default
            and len(product.users) == 1
            and storages_of(product) == storages_of(value)
            and all(each.meta["val"].is_contiguous() for each in (product, value, slot))
            and product.meta["val"].dtype == slot.meta["val"].dtype
        ):
            with graph.inserting_before(product):
                made = graph.call_function(multiply_into, (slot, *product.args, factor))
                made.meta["val"] = None
            graph.erase_node(node)
    graph.eliminate_dead_code()


_VIEWS = frozenset(
    {_aten.permute.default, _aten.view.default, _aten.alias.default, _aten.t.default, _aten._unsafe_view.default,
     _aten.reshape.default, _aten.detach.default}
)  # fmt: skip


def _copy_early(graph: fx.Graph) -> None:
    """Move each change of an input from the end to right behind the last reader of the old value.

    With all of them at the end, a compiler that computes values where they are used would put off the updates of all
    buckets until the last one has come back.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    readers: dict[int, fx.Node] = {}
    copies = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            copies.append(node)
            continue
        for argument in node.all_input_nodes:
            for number in storages_of(argument):
                readers[number] = node
    for node in copies:
        target, value = node.args
        behind = [value, *(readers[number] for number in storages_of(target) if number in readers)]
        last = max(behind, key=order.__getitem__)
        if last.op == "placeholder":
            continue
        last.append(node)
