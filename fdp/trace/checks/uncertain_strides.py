"""Values whose strides a trace is not certain of, where random numbers are drawn for them.

Which number is drawn for which element depends on the memory order of the elements. A trace knows it from torch's rules
for fake tensors. Views and in-place operators follow from shapes alone, and for contiguous values rule and kernel
agree. But if an operator takes or makes a value of other strides, the rules of two dozen operators predict another
order than their CPU kernels choose (torch 2.13: `copysign`, `logsigmoid`, `2 ** x`, `div` with rounding; in bfloat16
even a sum with an expanded tensor), and those of an operator of another library are not known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import effects_of, tensors_in
from fdp.trace.trace import Trace

_aten = torch.ops.aten
_ROW_BY_ROW = frozenset({
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.embedding.default,
})  # fmt: skip
"""Operators with contiguous results, whatever they are given."""

AS_GIVEN = frozenset({
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.clone.default, _aten._to_copy.default,
    _aten.bernoulli.default, _aten.bernoulli.p, _aten.native_dropout.default,
    _aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.tanh.default, _aten.sigmoid.default,
    _aten.exp.default, _aten.neg.default, _aten.pow.Tensor_Scalar, _aten.clamp.default,
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.where.self,
    _aten.mul.Scalar, _aten.div.Scalar, _aten.add.Scalar,
})  # fmt: skip
"""Operators whose results have the memory order of their arguments, if these all have one: rules and kernels were
compared."""


def uncertain_for_draws(trace: Trace) -> set[fx.Node]:
    """Find the values that random draws take, and whose strides are uncertain.

    Args:
        trace: the trace.

    Returns:
        Nodes of its graph, and of the bodies of its loops.
    """
    return set(_unsure_in(trace, set()))


def _unsure_in(trace: Trace, unsure: set[fx.Node]) -> Iterator[fx.Node]:
    """The uncertain values that draws take; `unsure` has the uncertain inputs, and gets all other uncertain values."""
    bodies = {loop.node: loop.body for loop in trace.loops}
    for node in trace.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if is_loop(node):
            operands: Any = node.args[2]
            body = bodies[node.name]
            # The first that a body takes is its number.
            taken = dict(zip(body.graph.graph.find_nodes(op="placeholder")[1:], operands, strict=True))
            inside = _unsure_in(body, {each for each, operand in taken.items() if operand in unsure})
            yield from (taken.get(each, each) for each in inside)
            continue
        if effects_of(node).random:
            yield from (each for each in node.all_input_nodes if each in unsure)
        if _is_unsure(node, unsure):
            unsure.add(node)


def _is_unsure(node: fx.Node, unsure: set[fx.Node]) -> bool:
    given = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), (torch.Tensor, list, tuple))]
    effects = effects_of(node)
    if node.target is operator.getitem or effects.view:
        return given[0] in unsure
    if not isinstance(node.target, OpOverload):
        return not all(each not in unsure and _lies_in_rows(each) for each in (*given, node))
    returned = [each.alias_info for each in schema_of(node.target).returns]
    if all(info is not None and info.is_write for info in returned):
        return any(each in unsure for each in effects.writes)
    in_rows = torch.contiguous_format in (node.kwargs.get("memory_format"), *node.args[1:])
    if node.target in _ROW_BY_ROW or in_rows or not given:
        return False
    if any(each in unsure for each in given):
        return True
    if node.target in AS_GIVEN and _lie_in_one_way(given):
        return False
    return not all(map(_lies_in_rows, (*given, node)))


def _lie_in_one_way(given: Sequence[fx.Node]) -> bool:
    lies = [each.meta["val"] for each in given]
    return len({(each.shape, each.stride()) for each in lies if each.dim()}) <= 1


def _lies_in_rows(node: fx.Node) -> bool:
    return all(each.is_contiguous() for each in tensors_in(node.meta.get("val")) if each.layout is torch.strided)
