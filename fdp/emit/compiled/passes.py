"""Passes from a functional graph to the one that a compiler gets: effects are declared, in the order of the plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import DECLARED, copy_into, declare_effects, multiply_into, snapshot
from fdp.emit.compiled.storage_indexing import index_flat_copies
from fdp.pytorch.overloads import schema_of
from fdp.pytorch.tensors import geometry
from fdp.trace.operators.effects import bound_arguments, storages_of

_aten = torch.ops.aten


def declare(graph: fx.Graph, multiply: bool) -> None:
    """Declare in a functional graph what changes memory, and when.

    Args:
        graph: changed in place.
        multiply: whether products are computed right in their buckets, by the library's kernel.
    """
    for each in PASSES_THAT_MULTIPLY if multiply else PASSES:
        each(graph)


def _written_by(node: fx.Node) -> Iterator[int]:
    """The memory that a node changes, by its schema or by that of the operator that will replace it."""
    if node.target in (copy_into, _aten.copy_.default):
        yield from storages_of(node.args[0])  # type: ignore[arg-type]
    elif node.target in DECLARED:
        declared = schema_of(DECLARED[node.target]).arguments
        for argument, (_, value) in zip(declared, bound_arguments(node), strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    yield from storages_of(item)


def _keep_snapshots(graph: fx.Graph) -> None:
    """Turn copies of values that are changed later into snapshots: a compiler might use the original for a copy.

    It knows other operators that may copy and do nothing else: a sum with zeros, a cast to the same type and back.
    """
    changes: dict[int, int] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in order:
        changes.update(dict.fromkeys(_written_by(node), order[node]))
    constants: set[fx.Node] = set()
    for node in order:
        if node.op == "call_function" and all(argument in constants for argument in node.all_input_nodes):
            constants.add(node)
        source = _copied(node, constants)
        if source is None or _stride_order_of(source) != _stride_order_of(node):
            continue
        last = max(changes.get(number, -1) for number in (*storages_of(node), *storages_of(source)))
        if node.target is _aten.clone.default:
            if last >= 0:
                node.target, node.args, node.kwargs = snapshot, (source,), {}
        elif last > order[node]:
            with graph.inserting_after(node):
                kept = graph.call_function(snapshot, (node,))
            kept.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(kept, delete_user_cb=partial(operator.is_not, kept))


def _stride_order_of(node: fx.Node) -> Any:
    value = node.meta["val"]
    return geometry(value)[:2], value.dtype


def _copied(node: fx.Node, constants: set[fx.Node]) -> fx.Node | None:
    """The value that a compiler may take a node for, if both have the same strides.

    Args:
        node: any node.
        constants: nodes that are made of numbers alone; they may turn out to be all zeros, or all ones.
    """
    target, args = node.target, node.args
    found: Any = None
    if target in _ARITHMETIC:
        varying = [argument for argument in args[:2] if argument not in constants]
        found = varying[0] if len(varying) == 1 and all(isinstance(each, fx.Node) for each in args[:2]) else None
    elif target in _COPIED:
        found = args[_COPIED[target]]
    elif target is _aten.cat.default:
        pieces: Any = args[0]
        found = pieces[0] if len(pieces) == 1 else None
    elif target in _OF_INTEGERS:
        first: Any = args[0]
        found = None if first.meta["val"].is_floating_point() else first
    elif target is _aten.pow.Tensor_Scalar:
        found = args[0] if args[1] == 1 else None
    elif target is _convert:
        found = args[0]
        while isinstance(found, fx.Node) and found.target is _convert:
            found = found.args[0]
    return found if isinstance(found, fx.Node) and isinstance(found.meta.get("val"), torch.Tensor) else None


_convert = torch.ops.prims.convert_element_type.default
_ARITHMETIC = frozenset({_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor})
_OF_INTEGERS = frozenset({_aten.ceil.default, _aten.floor.default, _aten.round.default, _aten.trunc.default})
_COPIED: dict[Any, int] = {
    _aten.clone.default: 0,
    _aten.copy.default: 1,
    _aten.slice_scatter.default: 1,
    _aten.repeat.default: 0,
    _aten.constant_pad_nd.default: 0,
    torch.ops.prims.device_put.default: 0,
}
"""Operators whose result may equal an argument, with the position of that."""


def _multiply_into_slots(graph: fx.Graph) -> None:
    """Compute a product into its bucket, if nothing else reads it."""
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
    """Move each copy into an input from the end of the graph to right behind the last reader of the old value.

    With all of them at the end, a compiler that computes values where they are used would put off the updates of all
    buckets until the last one has come back.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    readers: dict[int, fx.Node] = {}
    writers: dict[int, fx.Node] = {}
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
        writers.update(dict.fromkeys(_written_by(node), node))
    for node in copies:
        target, value = node.args
        behind = [value, *(readers[number] for number in storages_of(target) if number in readers)]
        # A message or a fused optimizer may still change the new value, in place.
        behind += [writers[number] for number in storages_of(value) if number in writers]
        last = max(behind, key=order.__getitem__)
        if last.op == "placeholder":
            continue
        last.append(node)


_IN_PLACE: tuple[Callable[[fx.Graph], object], ...] = (
    fx.Graph.eliminate_dead_code,
    index_flat_copies,
    _keep_snapshots,
    _copy_early,
)
"""What changes memory, and when."""

PASSES = (*_IN_PLACE, declare_effects)
"""From a functional graph to the one that a compiler gets, one after the other."""

PASSES_THAT_MULTIPLY = (*_IN_PLACE, _multiply_into_slots, declare_effects)
"""Likewise, if the library multiplies."""
