"""Run the graph of a trace operator by operator, as it is: on this rank alone, with eager kernels, in its own memory.

It is the simplest program for a trace, and others are compared with it: the graph's order, no memory reuse, and no
replaced operators.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fdp.distributed.other_ranks import OtherRanks
from fdp.emit.memory.instructions import arguments_of
from fdp.pytorch.overloads import schema_of
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import effects_of, is_marker, mesh_dimension_of

Lookup = Callable[[fx.Node], Any]
"""The value of a node."""

After = Callable[[fx.Node, Lookup, Any], None]
"""What is called after each call with its node, a way to look values up, and its result."""


def call_node(
    node: fx.Node, value_of: Lookup, others: OtherRanks, entries: Sequence[int] = (), after: After | None = None
) -> Any:
    """Call the operator of a node, or some entries of it.

    Args:
        node: a node of a traced graph that calls something.
        value_of: gives the value of each node that it takes; what it changes in place is changed.
        others: what this rank takes the other ranks to hold.
        entries: which entries of its lists to call it with; all of them if there are none.
        after: for a loop, what is called after each call in its body.

    Returns:
        What it returns.
    """
    args, kwargs = arguments_of(node, entries)
    values: Any = fx.map_arg(tuple(args), value_of)
    options: Any = fx.map_arg(kwargs, value_of)
    if is_marker(node):
        return _collective(node, values, others)
    if is_loop(node):
        body, count, operands = values
        for index in range(count):
            Replay(body, [torch.tensor([index], device=node.meta["index_device"]), *operands], others, after).run()
        return None
    if node.target is torch.ops.higher_order.cond:
        condition, first, second, operands = values
        return first(*operands) if condition else second(*operands)
    target: Any = node.target
    return target(*values, **options)


def _collective(node: fx.Node, values: Sequence[Any], others: OtherRanks) -> torch.Tensor:
    if is_marker(node, "axis_index"):
        own = others.along(mesh_dimension_of(node)).rank
        return torch.tensor(own, dtype=torch.int64, device=node.meta["val"].device)
    if is_marker(node, "vary"):
        return torch.clone(values[0])
    # The marker itself, on another axis than the one that it was traced on.
    schema: Any = node.target
    names = [argument.name for argument in schema_of(schema).arguments]
    axis_name = others.along(mesh_dimension_of(node)).axis_name
    given = [axis_name if name == "axis" else value for name, value in zip(names, values, strict=False)]
    result: torch.Tensor = schema(*given)
    return result


class Replay:
    """One run of a graph.

    Args:
        graph_module: the graph.
        inputs: a tensor for each placeholder; they may be changed.
        others: what this rank takes the other ranks to hold.
        after: called after each call, also in the bodies of loops where `looks_inside`.
        looks_inside: see `after`.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        others: OtherRanks,
        after: After | None = None,
        looks_inside: bool = False,
    ) -> None:
        self._module, self._others, self._after = graph_module, others, after
        self._inside = after if looks_inside else None
        self._values: dict[fx.Node, Any] = dict(
            zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        )

    def run(self) -> list[torch.Tensor]:
        """Run all of it; returns the outputs. Each value is dropped after its last use."""
        with torch.no_grad():
            order = [node for node in self._module.graph.nodes if node.op == "call_function"]
            for node, last in zip(order, last_uses(order), strict=True):
                result = call_node(node, self.value_of, self._others, after=self._inside)
                if self._after is not None:
                    self._after(node, self.value_of, result)
                self._values[node] = result
                for other in last:
                    self._values.pop(other, None)
            (outputs,) = self._module.graph.output_node().args
            return [self.value_of(node) for node in outputs] if outputs else []  # type: ignore[union-attr, arg-type]

    def value_of(self, node: fx.Node) -> Any:
        """The value of a node that has run, or that the graph holds."""
        if node not in self._values and node.op == "get_attr":
            return held_value(node)
        return self._values[node]


def held_value(node: fx.Node) -> Any:
    """The object that a graph holds for a node: a closed-over tensor, a generator, another graph."""
    module = node.graph.owning_module
    assert module is not None
    value = getattr(module, str(node.target))
    return value.detach() if isinstance(value, torch.Tensor) else value


def last_uses(order: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """For each node, in the order in which they run: the values that no later node and no output needs."""
    kept = {output for node in order[:1] for output in node.graph.output_node().all_input_nodes}
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        last.update(dict.fromkeys((node, *node.all_input_nodes), at))
    found: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node, at in last.items():
        if node not in kept:
            found[at].append(node)
    for at in range(len(order)):
        yield found[at]


def makes_values(node: fx.Node) -> bool:
    """Whether a node computes a value: it is no view and no entry of a list."""
    return node.target is not operator.getitem and not effects_of(node).view
