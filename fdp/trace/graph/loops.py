"""Loops as one operation: all microbatches of `fdp.accumulate` but the last.

A step is traced flat, one time through the loop between two marks. Here what lies between them becomes a graph of its
own, and one call of it in the step's graph. Its effects are those of the operators in it on memory from outside: what
it adds up lies in tensors of zeros that it shares with the rest of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fdp import pytree
from fdp.errors import TraceError, build_message
from fdp.trace.graph.dependencies import operations_of
from fdp.trace.operators.effects import collective_of, effects_of, is_marker, storage_indexed, storages_of
from fdp.trace.operators.source import located
from fdp.trace.trace import Input, Loop, Trace


class RunLoop:
    """Run a graph several times, each time with its number and the same tensors; they are changed in place."""

    __name__ = "run_loop"
    __module__ = __name__

    def __call__(self, body: Any, count: int, operands: Any) -> None:
        device = next((x.device for x in operands), None)
        for index in range(count):
            body(torch.tensor([index], device=device), *operands)

    def __str__(self) -> str:
        return "fdp.accumulate"

    __repr__ = __str__


run_loop = RunLoop()


def is_loop(node: fx.Node) -> bool:
    """Whether a node is the call of a loop."""
    return node.op == "call_function" and node.target is run_loop


def changed_operands(node: fx.Node) -> tuple[list[int], list[int]]:
    """The positions of the tensors that a loop changes, and of those that it only reads."""
    operands: Any = node.args[2]
    writes = effects_of(node).writes
    changed = [index for index, operand in enumerate(operands) if operand in writes]
    return changed, [index for index in range(len(operands)) if index not in set(changed)]


def outline_loops(name: str, graph_module: fx.GraphModule) -> None:
    """Replace each loop of a flat graph by one call of a graph of its own.

    Args:
        name: the user's function, for messages.
        graph_module: the graph; it is changed.

    Raises:
        TraceError: a loop leaves values behind, or changes what is not its own; names the lines.
    """
    for number, (begin, region, end) in enumerate(list(regions_of(graph_module.graph))):
        _outline(name, graph_module, begin, region, end, f"fdp_loop_{number}")


def regions_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node], fx.Node]]:
    """The loops of a graph that are not outlined yet: the mark before each, the nodes in it, and the mark behind."""
    for begin in graph.nodes:
        if is_marker(begin, "loop_begin"):
            end = next(node for node in begin.users if is_marker(node, "loop_end"))
            region, node = [], begin.next
            while node is not end:
                region.append(node)
                node = node.next
            yield begin, region, end


def loops_of(name: str, graph_module: fx.GraphModule) -> Iterator[Loop]:
    """The loops of a graph, each with its body as a trace.

    Args:
        name: the user's function.
        graph_module: the graph, after `outline_loops`.
    """
    for node in graph_module.graph.nodes:
        if is_loop(node):
            yield Loop(node.name, node.args[1], _trace_of_body(f"{name}, a microbatch", graph_module, node))


def _trace_of_body(name: str, graph_module: fx.GraphModule, loop: fx.Node) -> Trace:
    body = getattr(graph_module, str(loop.args[0]))
    changed = {storage for node in effects_of(loop).writes for storage in storages_of(node)}
    inputs = []
    for node in body.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        inputs.append(
            Input(
                name=node.name,
                shape=tuple(value.shape),
                dtype=value.dtype,
                device=value.device,
                stride=value.stride(),
                offset=int(value.storage_offset()),
                role="batch",
                donated=not changed.isdisjoint(storages_of(node)),
                shares_memory=False,
            )
        )
    operations, _, _ = operations_of(body.graph)
    return Trace(
        name=name,
        source=str(loop.meta.get("source") or ""),
        world_size=1,
        inputs=tuple(inputs),
        outputs=(),
        operations=tuple(operations),
        reductions=(),
        replicated_constants=(),
        closed_over=(),
        replicated_calls=(),
        graph=body,
        in_spec=pytree.structure_of(tuple(range(len(inputs)))),
        out_spec=pytree.structure_of(()),
    )


def _outline(
    name: str, graph_module: fx.GraphModule, begin: fx.Node, region: list[fx.Node], end: fx.Node, attribute: str
) -> None:
    graph = graph_module.graph
    inside = set(region)
    left = {n for node in region for n in storages_of(node) if any(user not in inside for user in node.users)}
    moved = _move_ahead(graph_module, begin, region, left)
    region = [node for node in region if node not in moved]
    inside = set(region)
    _return_to_owners(region, inside)
    _refuse_leaks(name, region, inside, end)
    _refuse_messages(name, region)

    outside: dict[fx.Node, None] = {}
    for node in region:
        outside.update(dict.fromkeys(a for a in node.all_input_nodes if a not in inside and a is not begin))
    operands = list(outside)
    _refuse_numbers(name, operands, region)
    body, copies = fx.Graph(), {}
    # Operands keep their names; `aten.index` makes one that is called as the number is.
    number = "index"
    while number in {operand.name for operand in operands}:
        number += "_"
    index = copies[begin] = body.placeholder(number)
    index.meta["val"] = begin.meta["val"]
    for operand in operands:
        copies[operand] = body.placeholder(operand.name)
        copies[operand].meta["val"] = operand.meta["val"]
    for node in region:
        copies[node] = body.node_copy(node, copies.__getitem__)
        copies[node].meta.pop("effects", None)
    body.output(())
    _refuse_places(name, body, operands)
    setattr(graph_module, attribute, fx.GraphModule(graph_module, body))
    with graph.inserting_before(begin):
        held = graph.create_node("get_attr", attribute, name=attribute)
        loop = graph.call_function(run_loop, (held, begin.args[1], operands))
    loop.meta["index_device"] = begin.meta["val"].device
    loop.meta.update(source=begin.meta.get("source"), backward=False, val=None)
    for node in reversed(region):
        graph.erase_node(node)
    graph.erase_node(end)
    graph.erase_node(begin)


def _move_ahead(graph_module: fx.GraphModule, begin: fx.Node, region: list[fx.Node], left: set[int]) -> set[fx.Node]:
    """Move the creation of tensors that outlive the loop, and closed-over tensors, in front of it."""
    moved: set[fx.Node] = set()
    inside = set(region)
    for node in region:
        made_of_nothing = all(argument in moved or argument not in inside for argument in node.all_input_nodes)
        held = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        creates = isinstance(held, torch.Tensor) or (
            node.op == "call_function"
            and begin not in node.all_input_nodes
            and effects_of(node).pure
            and not left.isdisjoint(storages_of(node))
        )
        if made_of_nothing and creates:
            begin.prepend(node)
            moved.add(node)
    return moved


def _return_to_owners(region: list[fx.Node], inside: set[fx.Node]) -> None:
    """An operator that changes a tensor returns it: what comes after the loop takes the tensor itself."""
    for node in region:
        later = [user for user in node.users if user not in inside]
        if not later or node.op != "call_function":
            continue
        owner: Any = node
        while owner in inside and effects_of(owner).writes and owner.args and owner.args[0] in effects_of(owner).writes:
            owner = owner.args[0]
        if owner is not node and owner not in inside:
            for user in later:
                user.replace_input_with(node, owner)
                user.meta.pop("effects", None)


def _refuse_leaks(name: str, region: list[fx.Node], inside: set[fx.Node], end: fx.Node) -> None:
    offenders = [located(node) for node in region if any(user not in inside and user is not end for user in node.users)]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} keeps values of one microbatch of fdp.accumulate for later; there is one for each.",
                offenders,
                remedy="return them from the function that fdp.accumulate calls: they come back stacked.",
            )
        )


def _refuse_messages(name: str, region: list[fx.Node]) -> None:
    offenders = [located(node) for node in region if collective_of(node) is not None]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} sends messages in the microbatches of fdp.accumulate.",
                offenders,
                remedy="average what fdp.accumulate returns, in one message.",
            )
        )


def _refuse_numbers(name: str, operands: list[fx.Node], region: list[fx.Node]) -> None:
    wrong = {node for node in operands if not isinstance(node.meta.get("val"), torch.Tensor)}
    offenders = [located(node) for node in region if not wrong.isdisjoint(node.all_input_nodes)]
    if wrong:
        raise TraceError(
            build_message(
                f"step {name!r} takes a number that it read from a tensor into the microbatches of fdp.accumulate.",
                offenders,
                remedy="use the tensor itself there, or read the number inside.",
            )
        )


def _refuse_places(name: str, body: fx.Graph, operands: list[fx.Node]) -> None:
    """Refuse `as_strided` of a tensor that the loop is given: its storage offset differs from that of the trace."""
    given = {storage for operand in operands for storage in storages_of(operand)}
    offenders = [
        located(node)
        for node in body.nodes
        if any(not given.isdisjoint(storages_of(argument)) for argument in storage_indexed(node))
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} looks at its arguments by places in memory in a microbatch of fdp.accumulate.",
                offenders,
                remedy="clone the tensor first, or use ordinary views.",
            )
        )
