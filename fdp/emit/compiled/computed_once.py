"""Values that are compared are computed once: two computations of one value may round differently.

Inductor computes a pointwise value again in each loop that reads it. One loop may use vector instructions and another
one scalar functions, which round the last bit differently (`sin`, `tanh`). That is nothing to most readers. But a value
that is compared with the largest of its own elements, as in the gradient of `amax`, is then equal to none of them, and
the gradient is lost (seen in torch 2.13, with `torch.compile` as well).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.operators.effects import operator_name

_MARK = "fdp: computed once"

_EQUALITY = frozenset({"eq", "ne"})
_ORDER = frozenset({"ge", "le", "gt", "lt"})
_SELECT = frozenset({
    "amax", "amin", "max", "min", "aminmax", "cummax", "cummin", "kthvalue", "median", "mode", "nanmedian",
    "scatter_reduce", "sort", "topk",
})  # fmt: skip
"""Operators whose results are elements of their arguments. With these, values are compared by order as well."""


def mark_compared(module: fx.GraphModule) -> None:
    """Mark the values that have to be computed once.

    These are floating-point values that a comparison reads, perhaps through pointwise operators and views, and that
    something else reads, too: what it computes from them may be what they are compared with. Where the graph itself
    computes such a value twice, it does so once afterwards.

    Args:
        module: a graph for the compiler, and those inside of it.
    """
    for inside in module.modules():
        if not isinstance(inside, fx.GraphModule):
            continue
        comparisons = [node for node in inside.graph.nodes if _compares(node)]
        if not comparisons:
            continue
        _leave_out_repeated(inside.graph, {value for node in comparisons for value in _compared(node)})
        inside.recompile()
        for value in {value for node in comparisons for value in _compared(node)}:
            if _is_pointwise(value) and _is_floating(value) and len(_readers(value)) > 1:
                value.meta[_MARK] = True


def _compares(node: fx.Node) -> bool:
    """Whether a node compares two values that may have been computed from one."""
    name = operator_name(node)
    if name not in _EQUALITY | _ORDER or len(set(node.all_input_nodes)) < 2:
        return False
    return name in _EQUALITY or any(operator_name(value) in _SELECT for value in _compared(node))


def _compared(node: fx.Node) -> set[fx.Node]:
    """The operands of a comparison, and what a loop that reads them may compute anew."""
    return {value for operand in node.all_input_nodes for value in _computed_from(operand)}


def _leave_out_repeated(graph: fx.Graph, values: set[fx.Node]) -> None:
    """Leave out calls that repeat an earlier one, where either is among some values and no memory changes between."""
    known: dict[tuple[Any, str, str], fx.Node] = {}
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            known.clear()
        if not (_is_pointwise(node) or _is_view(node)):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node and not values.isdisjoint((first, node)):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            values.add(first)


def _computed_from(value: fx.Node) -> set[fx.Node]:
    """What the loop that reads a value may compute anew: the value, and what it comes from through pointwise operators
    and views. What computes all of a value first is the last of them."""
    found: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if _is_pointwise(node) or _is_view(node):
                pending.extend(node.all_input_nodes)
    return found


def _readers(value: fx.Node) -> set[fx.Node]:
    """What reads a value, perhaps through views."""
    found: set[fx.Node] = set()
    pending = list(value.users)
    while pending:
        node = pending.pop()
        if _is_view(node):
            pending.extend(node.users)
        else:
            found.add(node)
    return found


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or operator_name(node) in _COPIES


_COPIES = frozenset({"_to_copy", "clone", "convert_element_type", "where"})
"""Pointwise operators that torch does not tag as such."""


def _is_view(node: fx.Node) -> bool:
    """Whether a node is a view, or one of several results."""
    return node.target is operator.getitem or (
        isinstance(node.target, OpOverload)
        and any(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in schema_of(node.target).returns
        )
    )


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


@contextmanager
def marked_are_kept(lowering: Any) -> Iterator[None]:
    """Have inductor put marked values into memory, from where all their readers take them.

    Args:
        lowering: `GraphLowering`. `call_function` lowers one node, which is `current_node`; `realize` of what it
            returns ends the noting down of pointwise arithmetic.
    """
    before = lowering.call_function

    @functools.wraps(before)
    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        made = before(self, target, args, kwargs)
        if _MARK in self.current_node.meta:
            made.realize()
        return made

    lowering.call_function = call_function
    try:
        yield
    finally:
        lowering.call_function = before
