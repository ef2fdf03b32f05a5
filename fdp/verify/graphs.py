"""Graphs of a compiler's operators, run on terms: a decomposed trace, and the graph for the compiler."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.pytorch.tensors import storage_id
from fdp.trace.capture.capture import is_fake
from fdp.verify.higher import function_name, higher_order
from fdp.verify.machine import TermMachine, holds_tensors
from fdp.verify.memory import Block, View, marks_of, view_of
from fdp.verify.schemas import Operator, operator_of
from fdp.verify.terms import Term
from fdp.verify.values import Values

Special = Callable[["GraphOnTerms", fx.Node, Sequence[Any], Mapping[str, Any]], Any]
"""(graph, node, its arguments and keyword arguments with views in place of tensors) -> its result."""


class GraphOnTerms(TermMachine):
    """A graph that computes new values, except for copies into its inputs and for some special operators.

    Args:
        values: makes terms.
        module: the graph.
        inputs: what it is given.
        special: by name of the operator, how those are carried out that are not what their schemas say.

    Attributes:
        env: the value of each node so far.
        suspect: the first node that computes what the trace does not.
    """

    def __init__(
        self, values: Values, module: fx.GraphModule, inputs: Sequence[View], special: Mapping[str, Special]
    ) -> None:
        super().__init__(values)
        self._module, self._special = module, special
        self.env: dict[fx.Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self.suspect: str | None = None
        self._node: fx.Node | None = None

    def run(self) -> list[Any]:
        """Run the graph; returns its results."""
        for node in self._module.graph.nodes:
            self._node = node
            if node.op == "get_attr":
                self.env[node] = self._held(getattr(self._module, str(node.target), None))
            elif node.op == "call_function":
                self.env[node] = self._function(node)
        made: Any = self._module.graph.output_node().args[0]
        return [self.env[node] if isinstance(node, fx.Node) else node for node in made]

    def _held(self, value: object) -> Any:
        """What the graph itself holds; a tensor there is a literal of a decomposition, and known by its bytes."""
        if not isinstance(value, torch.Tensor) or is_fake(value):
            return value
        view = view_of(Block("constant"), value.storage_offset(), value.shape, value.stride(), value.dtype)
        self.memory.write(view, self.values.constant(value))
        return view

    def wrote(self, term: Term) -> None:
        if not term.traced and self.suspect is None and term.key[0] not in ("full", "constant", "empty"):
            self.suspect = str(self._node)
        if term.origin is None and self._node is not None and term.traced:
            term.origin = self._node.name

    def given(self, value: object) -> Any:
        """An argument, with views in place of tensors."""
        if isinstance(value, fx.Node):
            return self.env[value]
        if isinstance(value, (list, tuple)):
            return [self.given(each) for each in value]
        return value

    def fresh_view(self, tensor: torch.Tensor) -> View:
        """New memory for a value with the layout of an example."""
        marks = marks_of(tensor)
        return view_of(Block("fresh"), 0, tensor.shape, tensor.stride(), tensor.dtype, marks)

    def _function(self, node: fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = self.given(node.args), {name: self.given(value) for name, value in node.kwargs.items()}
        if target is python_operator.getitem:
            return args[0][args[1]]
        if isinstance(target, OpOverload):
            if (special := self._special.get(schema_of(target).name)) is not None:
                return special(self, node, args, kwargs)
            return self._operator(node, operator_of(target), args, kwargs)
        if holds_tensors(node.meta.get("val")):
            return self._higher(node, args, kwargs)
        # Arithmetic with numbers that are read from tensors.
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
        return self.values.call(name, {str(at): self.values.encode(each) for at, each in enumerate(args)})

    def _operator(self, node: fx.Node, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raw = operator.bind(node.args, node.kwargs)
        given = operator.bind(args, kwargs)
        value: Any = node.meta.get("val")
        if not holds_tensors(value) and (operator.number or value is not None):
            encoded = {p.name: self.values.encode(each) for p, each in zip(operator.parameters, given, strict=True)}
            return self.values.call(operator.name, encoded)
        base = raw[0].meta.get("val") if raw and isinstance(raw[0], fx.Node) else None
        if operator.views and isinstance(base, torch.Tensor) and _same_memory(base, value):
            return self._looked_at(given[0], base, value)

        def fresh(call: Term, reads: list[View]) -> list[Any]:
            results = list(value) if len(operator.results) > 1 else [value]
            owners = zip(results, operator.results, strict=True)
            return [self._fresh(each) for each, owner in owners if owner is None]

        made = self.perform(operator, given, fresh)
        results = [
            given[owner] if each is None and owner is not None else each
            for each, owner in zip(made, operator.results, strict=True)
        ]
        return results[0] if len(results) == 1 else results

    def _higher(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = node.meta["val"]
        given = [_graph_text(each) for each in (*args, *kwargs.values())]

        def fresh(call: Term, reads: list[View]) -> list[Any]:
            return [self._fresh(each) for each in (value if isinstance(value, (list, tuple)) else [value])]

        results = higher_order(self, function_name(node.target), given, fresh)
        return results if isinstance(value, (list, tuple)) else results[0]

    def _fresh(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fresh_view(value)
        return [self._fresh(each) for each in value] if isinstance(value, (list, tuple)) else value

    def _looked_at(self, view: View, base: torch.Tensor, value: Any) -> Any:
        """One or several views of a tensor."""
        if isinstance(value, (list, tuple)):
            return [self._looked_at(view, base, each) for each in value]
        start = value.storage_offset() * value.itemsize - base.storage_offset() * base.itemsize
        found = view_of(view.block, 0, value.shape, value.stride(), value.dtype, marks_of(value))
        return found._replace(start=view.start + start)


def _same_memory(base: torch.Tensor, value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_same_memory(base, each) for each in value)
    return isinstance(value, torch.Tensor) and storage_id(value.untyped_storage()) == storage_id(base.untyped_storage())


def _graph_text(value: object) -> Any:
    """The text of a graph, without unused nodes. (The graph of a branch is another object each time it is captured.)"""
    if isinstance(value, fx.GraphModule):
        live = fx.Graph()
        live.output(live.graph_copy(value.graph, {}))
        live.eliminate_dead_code()
        inner = [_graph_text(getattr(value, str(node.target))) for node in live.find_nodes(op="get_attr")]
        return "\n".join([str(live), *map(str, inner)])
    return value
