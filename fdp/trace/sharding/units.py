"""The units of an operator call, one for each list entry, and which of them can compute parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload
from fdp.pytorch.tensors import geometry
from fdp.trace.operators.effects import (
    FUSED_OPTIMIZERS,
    bound_arguments,
    effects_of,
    entries_of,
    list_arguments,
    nodes_in,
    operator_name,
    storages,
    storages_of,
)

_ELEMENTWISE = frozenset({
    # Beside those that torch tags as pointwise.
    "_to_copy", "copy_", "copy", "clone", "fill_", "fill", "zero_", "zeros_like", "ones_like", "full_like",
    "lift_fresh_copy", "where", "masked_fill", "masked_fill_", "zero",
})  # fmt: skip

_REDUCES = frozenset({"sum", "linalg_vector_norm", "mean", "amax", "amin", "max", "min", "all", "any"})
_LIST_REDUCES = frozenset({"_foreach_norm"})
_NUMBERS = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
})  # fmt: skip
"""Dtypes of numbers that ranks can put together."""
_SMALL = 4
"""By so much what a tensor is reduced to is smaller, if ranks put it together. It is sent, and the tensor is not."""


@dataclass(frozen=True)
class Unit:
    """An operator call, or one entry of the lists of one.

    Attributes:
        node: the call.
        entry: which entry; None for a call as a whole.
        reads: the tensors that it takes and does not write.
        writes: those that it writes.
        makes: the memory of its results that is new.
        shape: of what it makes or writes, if that is one shape.
    """

    node: fx.Node
    entry: int | None
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    makes: tuple[int, ...]
    shape: tuple[int, ...] | None

    @property
    def results(self) -> tuple[int, ...]:
        """The memory of what it makes and writes."""
        return (*self.makes, *(number for x in self.writes for number in storages_of(x)))


def units_of(node: fx.Node) -> Iterator[Unit]:
    """The units of a call."""
    effects = effects_of(node)
    entries = entries_of(node)
    value = node.meta.get("val")
    for entry in range(entries) if entries is not None else (None,):
        own = node.all_input_nodes if entry is None else list(_of_entry(node, entry))
        writes = tuple(x for x in own if x in effects.writes)
        reads = tuple(x for x in own if x not in writes and _is_tensor(x))
        written = {number for x in writes for number in storages_of(x)}
        made = value if entry is None or not isinstance(value, (list, tuple)) else value[entry]
        makes = () if effects.view else tuple(number for number in storages(made) if number not in written)
        shapes = {tuple(x.meta["val"].shape) for x in writes if _is_tensor(x)}
        if makes:
            shapes |= {tuple(x.shape) for x in tensors_of(made)}
        yield Unit(node, entry, reads, writes, makes, shapes.pop() if len(shapes) == 1 else None)


def is_same_view(node: fx.Node) -> bool:
    """Whether a node is a view with the geometry of its argument."""
    if node.op != "call_function" or not effects_of(node).view or len(node.all_input_nodes) != 1:
        return False
    one, two = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if isinstance(one, (list, tuple)):
        return not effects_of(node.all_input_nodes[0]).view  # one of several results
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return False
    return geometry(one) == geometry(two)


def is_own_memory(node: fx.Node) -> bool:
    """Whether a node has a piece of memory to itself, and is no view of another shape."""
    while is_same_view(node):
        if isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple)):
            return True
        node = node.all_input_nodes[0]
    return not (node.op == "call_function" and effects_of(node).view)


def is_outer_product(node: fx.Node) -> bool:
    """Whether a product of matrices is one of a column and a row: each element is one product, with no sum to round."""
    left: Any = node.args[0]
    return operator_name(node) == "mm" and bool(left.meta["val"].shape[1] == 1)


def is_elementwise(unit: Unit) -> bool:
    """Whether each element of a unit's results depends only on the elements of its operands at the same index."""
    target, name = unit.node.target, operator_name(unit.node)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or effects_of(unit.node).random:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if unit.entry is not None:
        return name in FUSED_OPTIMIZERS or _is_elementwise_list(name)
    if name == "mm":
        return is_outer_product(unit.node)
    return torch.Tag.pointwise in target.tags or name in _ELEMENTWISE


@functools.cache
def _is_elementwise_list(name: str) -> bool:
    """Whether an operator on lists does to each tensor what an elementwise operator does."""
    single = name.removeprefix("_foreach_").rstrip("_")
    packet = getattr(torch.ops.aten, single, None)
    if packet is None or single in _REDUCES:  # `max` is one of two tensors, too
        return False
    return single in _ELEMENTWISE or any(
        torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()
    )


def is_reduction(unit: Unit) -> bool:
    """Whether a unit reduces one tensor along dimensions, such that what ranks make of parts can be put together.

    All ranks get the result; so it has to be small beside the tensor.
    """
    value: Any = unit.node.meta.get("val")
    name = operator_name(unit.node)
    if unit.entry is not None:
        return name in _LIST_REDUCES and value[unit.entry].dtype in _NUMBERS
    target: Any = unit.node.target
    return (
        name in _REDUCES
        and isinstance(target, OpOverload)
        and target.namespace == "aten"
        and isinstance(value, torch.Tensor)
        and (value.dtype in _NUMBERS or name in ("all", "any"))
        and len(unit.node.all_input_nodes) == 1
        and not unit.writes
        and (value.numel() == 1 or _SMALL * value.numel() <= unit.reads[0].meta["val"].numel())
    )


def kept_along(unit: Unit, dim: int) -> int | None:
    """Where a dimension of a tensor is in the result of its reduction; None if it is reduced."""
    (read,) = unit.reads
    size = read.meta["val"].dim()
    given = {argument.name: value for argument, value in bound_arguments(unit.node)}
    dims = given.get("dim")
    listed = [dims] if isinstance(dims, int) else list(dims or range(size))
    reduced = {each % size for each in listed}
    if dim in reduced:
        return None
    return dim if given.get("keepdim") else dim - sum(each < dim for each in reduced)


def _of_entry(node: fx.Node, entry: int) -> Iterator[fx.Node]:
    """The nodes that an entry takes: its own in the lists, and those that entries share."""
    lists = [value for _, value in list_arguments(node)]
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (list, tuple)) and any(value is one for one in lists):
            yield from nodes_in(value[entry : entry + 1])
        else:
            yield from nodes_in(value)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def tensors_of(value: object) -> Sequence[torch.Tensor]:
    """The tensors of the example value of a node."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (list, tuple)) else []
