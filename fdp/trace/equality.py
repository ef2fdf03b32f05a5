"""Whether two traces are of the same program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fdp.pytorch.tensors import bytes_of
from fdp.trace.trace import Trace

_MOST_ELEMENTS = 4096
"""Larger constants are the same only if they are one object."""


def same_program(one: Trace, other: Trace) -> bool:
    """Whether what was made of one trace serves for the other as well.

    Args:
        one: a trace.
        other: another trace of the same step, for the same arguments.

    Returns:
        Whether they are equal, numbers in operators and all, and use the same closed-over tensors.
    """
    if one != other or one.out_spec != other.out_spec or one.in_spec != other.in_spec:
        return False
    # Equality takes True for 1, and -0.0 for 0.0.
    if [_exactly(x.constant) for x in one.outputs] != [_exactly(x.constant) for x in other.outputs]:
        return False
    if any(getattr(one.graph, target) is not getattr(other.graph, target) for target, _ in one.closed_over):
        return False
    if one.whole is not None and other.whole is not None:
        return same_program(one.whole, other.whole) and _same_graphs(one.graph, other.graph)
    return one.whole is other.whole and _same_graphs(one.graph, other.graph)


def _exactly(constant: object) -> tuple[Any, ...]:
    return type(constant), repr(constant)


def _same_graphs(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether operators and their arguments are the same, and constants that the trace has made have equal bits."""
    nodes, others = list(one.graph.nodes), list(other.graph.nodes)
    return len(nodes) == len(others) and all(
        _text(a) == _text(b) and (a.op != "get_attr" or _same_constants(_held(one, a), _held(other, b)))
        for a, b in zip(nodes, others, strict=True)
    )


def _text(node: fx.Node) -> tuple[Any, ...]:
    # With numbers to the last digit; an object without a text of its own differs by its address.
    arguments = fx.map_arg((node.args, node.kwargs), lambda argument: _NodeName(argument.name))
    return node.op, node.name, str(node.target), repr(arguments)


class _NodeName(str):
    """The name of a node, which no string among the arguments is taken for."""

    def __repr__(self) -> str:
        return f"%{self}"


def _held(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _same_constants(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return _same_graphs(one, other)
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.numel() > _MOST_ELEMENTS:
        return False
    alike = (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())
    if not alike or one.device.type != "cpu" or one.layout != torch.strided:
        return False
    return bytes_of(one) == bytes_of(other)
