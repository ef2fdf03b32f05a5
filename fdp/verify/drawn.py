"""Draws of random numbers, in a trace and in the graph to compile.

Both have to draw by the same operators, in the same order, on the same values, and for elements that lie in the same
order in memory. Of the trace its own examples say how they lie; of a call in the graph its text does, which is what it
goes by when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload
from fdp.pytorch.tensors import storage_id
from fdp.verify.decomposed import Call, is_draw
from fdp.verify.graphs import GraphOnTerms
from fdp.verify.higher import function_name, higher_order
from fdp.verify.memory import Block, View, view_of
from fdp.verify.schemas import operator_of
from fdp.verify.terms import Term


def drawn_in_trace(
    graph: GraphOnTerms, module: fx.GraphModule, call: Call, node: fx.Node, given: Sequence[View]
) -> list[View]:
    """Run a drawing call of a trace on terms.

    Args:
        graph: the trace taken apart.
        module: the trace.
        call: the call.
        node: what stands for it in the graph.
        given: the tensors that it is given.

    Returns:
        Its results in new memory, and then what it changes.
    """
    target: Any = call.node.target
    copies = _as_in_trace(graph, call.tensors, given)
    if not isinstance(target, OpOverload):
        found = drawn_inside(graph, module, call.node, [copies[each] for each in call.tensors])
        return _returned(graph, node, found)
    operator = operator_of(target)
    arguments = operator.bind(_given(module, copies, call.node.args), _given(module, copies, call.node.kwargs))
    example: Any = call.node.meta["val"]
    examples = list(example) if len(operator.results) > 1 else [example]
    new = [each for each, owner in zip(examples, operator.results, strict=True) if owner is None]
    made = graph.perform(operator, arguments, _fresh([_lying(each) for each in new]))
    results = [each for each in made if isinstance(each, View)]
    return _returned(graph, node, [*results, *(copies[each] for each in call.changed)])


def drawn_inside(graph: GraphOnTerms, module: fx.GraphModule, node: fx.Node, given: Sequence[View]) -> list[View]:
    """Run a higher-order function that draws on terms; returns its results.

    Args:
        graph: any graph.
        module: the trace.
        node: in the trace.
        given: the tensors that it is given, in the order of the node.
    """
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    copies = _as_in_trace(graph, tensors, given)
    arguments = [_given(module, copies, each) for each in (*node.args, *node.kwargs.values())]
    example: Any = node.meta["val"]
    examples = list(example) if isinstance(example, (list, tuple)) else [example]
    return higher_order(graph, function_name(node.target), arguments, _fresh([_lying(each) for each in examples]))


def higher_order_draws(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a trace that are higher-order functions and draw, in order."""
    return [node for node in module.graph.nodes if not isinstance(node.target, OpOverload) and is_draw(node)]


def _as_in_trace(graph: GraphOnTerms, nodes: Sequence[fx.Node], given: Sequence[View]) -> dict[fx.Node, View]:
    """Tensors with the layout of the trace. Equal elements in equal order are one tensor there as well."""
    copies: dict[fx.Node, View] = {}
    known: dict[Any, View] = {}
    for node, view in zip(nodes, given, strict=True):
        example = node.meta["val"]
        geometry = (example.storage_offset(), tuple(example.shape), example.stride(), example.dtype)
        place = (storage_id(example.untyped_storage()), geometry)
        if place not in known:
            known[place] = _lying(example)
            graph.memory.write(known[place], graph.values.read(view))
        copies[node] = known[place]
    return copies


def _given(module: fx.GraphModule, copies: Mapping[fx.Node, View], value: object) -> Any:
    if isinstance(value, fx.Node):
        return copies[value] if value in copies else getattr(module, str(value.target))
    if isinstance(value, (list, tuple)):
        return [_given(module, copies, each) for each in value]
    return {name: _given(module, copies, each) for name, each in value.items()} if isinstance(value, dict) else value


def drawn_as_said(
    graph: GraphOnTerms, node: fx.Node, read: Sequence[View], text: str, generators: Sequence[torch.Generator]
) -> list[View]:
    """Run a drawing call of the graph to compile on terms, as its text says.

    Args:
        graph: it.
        node: the call.
        read: the tensors that it is given.
        text: which operator it calls, with what, the layouts of these, and what it returns.
        generators: those that the text means by numbers.

    Returns:
        As `drawn_in_trace` does.
    """
    said = json.loads(text)
    namespace, packet, overload = said["operator"].split(".")
    operator = operator_of(getattr(getattr(getattr(torch.ops, namespace), packet), overload))
    copies: dict[int, View] = {}

    def given(value: object) -> Any:
        if isinstance(value, list):
            return [given(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "read" in value:
            return copied(value["read"], value["stride"])
        if "size" in value:
            return _view_of_layout(value)
        if "generator" in value:
            return generators[value["generator"]]
        ((kind, name),) = value.items()
        return torch.device(name) if kind == "device" else getattr(torch, name)

    def copied(number: int, stride: Sequence[int]) -> View:
        if number not in copies:
            view = read[number]
            copies[number] = view_of(Block("fresh"), 0, view.shape, stride, view.dtype)
            graph.memory.write(copies[number], graph.values.read(view))
        return copies[number]

    arguments = operator.bind(
        given(said["arguments"]), {name: given(value) for name, value in said["keywords"].items()}
    )
    new = [None if layout is None else _view_of_layout(layout) for layout in said["results"]]
    made = graph.perform(operator, arguments, _fresh(new))
    changed = [view for at in operator.written(arguments) for view in _views(arguments[at])]
    return _returned(graph, node, [*(each for each in made if isinstance(each, View)), *changed])


def _view_of_layout(layout: Mapping[str, Any]) -> View:
    return view_of(Block("fresh"), 0, layout["size"], layout["stride"], getattr(torch, layout["dtype"]))


def _lying(example: object) -> Any:
    if not isinstance(example, torch.Tensor):
        return example
    return view_of(Block("fresh"), 0, example.shape, example.stride(), example.dtype)


def _views(value: Any) -> list[View]:
    return [value] if isinstance(value, View) else [view for each in value for view in _views(each)]


def _fresh(new: list[Any]) -> Callable[[Term, list[View]], list[Any]]:
    return lambda call, reads: new


def _returned(graph: GraphOnTerms, node: fx.Node, found: Sequence[View]) -> list[View]:
    """A result with the layout of the graph to compile, which knows nothing of the trace."""
    example: Any = node.meta["val"]
    made = [graph.fresh_view(each) for each in example]
    for view, result in zip(made, found, strict=True):
        graph.memory.write(view, graph.values.read(result))
    return made
