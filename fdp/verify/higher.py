"""Calls of higher-order functions, such as conditions and loops: each is one call with an unknown result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from fdp.pytorch.overloads import OpOverload
from fdp.verify.machine import Fresh, TermMachine, places
from fdp.verify.memory import View
from fdp.verify.schemas import operator_of


def function_name(target: object) -> str:
    """The name of a higher-order function in terms."""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def draws_in(value: object) -> bool:
    """Whether graphs among arguments draw random numbers."""
    if isinstance(value, fx.GraphModule):
        return any(_node_draws(node) for node in value.graph.nodes)
    return isinstance(value, (list, tuple)) and type(value) is not View and any(map(draws_in, value))


def indexes_storage_in(value: object) -> bool:
    """Whether graphs among arguments index the storage of their operands by position."""
    if isinstance(value, fx.GraphModule):
        return any(map(_node_indexes_storage, value.graph.nodes))
    return isinstance(value, (list, tuple)) and type(value) is not View and any(map(indexes_storage_in, value))


def _node_indexes_storage(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return indexes_storage_in(getattr(node.graph.owning_module, str(node.target), None))
    return isinstance(node.target, OpOverload) and node.target.name().startswith("aten::as_strided")


def _node_draws(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return draws_in(getattr(node.graph.owning_module, str(node.target), None))
    if not isinstance(node.target, OpOverload):
        return False
    operator = operator_of(node.target)
    return operator.random and operator.draws(operator.bind(node.args, node.kwargs))


def higher_order(machine: TermMachine, name: str, given: Sequence[Any], fresh: Fresh) -> list[Any]:
    """A higher-order function, as one unknown function of its arguments."""
    values = machine.values
    arguments: dict[Any, Any] = {str(at): values.encode(value) for at, value in enumerate(given)}
    random = draws_in(given)
    if random:
        arguments["*drawn"] = machine.drawn
    if indexes_storage_in(given):
        arguments["*layout"] = tuple(map(places, all_views(given)))
    call = values.call(name, arguments)
    results: list[Any] = fresh(call, list(all_views(given)))
    for index, result in enumerate(results):
        if type(result) is View:
            term = values.result(call, index, result.shape, result.dtype)
            machine.memory.write(result, term)
            machine.wrote(term)
    if random:
        machine.drawn = values.terms.make(("drawn", call))
    return results


def all_views(value: object) -> Iterator[View]:
    """All views in arguments, in order."""
    if type(value) is View:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from all_views(each)


def apply_loop(
    machine: TermMachine, name: str, count: int, operands: Sequence[View], changed: Sequence[int], draws: bool
) -> None:
    """A loop, as one call: the memory that it changes is a function of all its arguments.

    Args:
        machine: what carries it out.
        name: the node that stands for it in the trace.
        count: how many times it runs.
        operands: what it is given.
        changed: positions of the operands that it changes.
        draws: whether it draws random numbers.
    """
    values = machine.values
    arguments: dict[Any, Any] = {"count": count, "operands": tuple(map(values.read, operands))}
    for at in changed:
        for other, view in enumerate(operands):
            if other != at and view.overlaps(operands[at]):
                geometry = (view.start - operands[at].start, view.shape, view.stride, view.dtype)
                arguments["*overlaps", at, other] = geometry
    if draws:
        arguments["*drawn"] = machine.drawn
    call = values.call(name, arguments)
    for at in changed:
        view = operands[at]
        term = values.result(call, (at,), view.shape, view.dtype)
        machine.memory.write(view, term)
        machine.wrote(term)
    if draws:
        machine.drawn = values.terms.make(("drawn", call))
