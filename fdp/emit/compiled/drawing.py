"""What a compiled step calls to draw random numbers: the operator that a text names, on tensors with its strides."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import current_generators, define
from fdp.emit.memory.elements import with_strides
from fdp.pytorch.overloads import schema_of
from fdp.trace.operators.control import choose

NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Types of arguments that are written by their names in torch."""


def is_written(schema: Any) -> bool:
    """Whether an argument is written, or a result is a written argument."""
    return schema.alias_info is not None and schema.alias_info.is_write


@dataclass(frozen=True)
class _DrawingCall:
    """A call that draws, read from its text.

    Attributes:
        operator: what is called.
        arguments: by position, with records in place of tensors and generators.
        keywords: by name, likewise.
        owned: numbers of tensors that are read and written: they get memory of their own.
        layouts: sizes, strides and kinds of what is returned.
    """

    operator: Any
    arguments: list[Any]
    keywords: dict[str, Any]
    owned: frozenset[int]
    layouts: list[dict[str, Any]]

    def run(self, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given: dict[int, torch.Tensor] = {}

        def built(value: Any) -> Any:
            if isinstance(value, list):
                return [built(each) for each in value]
            if not isinstance(value, dict):
                return value
            if "generator" in value:
                return current_generators()[value["generator"]]
            if "size" in value:
                return _empty(value)
            number = value["read"]
            if number not in given:
                given[number] = with_strides(read[number], value["stride"], anew=number in self.owned)
            return given[number]

        arguments = [built(value) for value in self.arguments]
        keywords = {name: built(value) for name, value in self.keywords.items()}
        made = self.operator(*arguments, **keywords)
        schema = schema_of(self.operator)
        results = made if isinstance(made, (list, tuple)) else [made]
        found = [
            each
            for returned, each in zip(schema.returns, results, strict=True)
            if not is_written(returned) and isinstance(each, torch.Tensor)
        ]
        given_as = dict(zip((each.name for each in schema.arguments), arguments, strict=False)) | keywords
        for argument in filter(is_written, schema.arguments):
            value = given_as.get(argument.name, [])
            found += value if isinstance(value, list) else [value]
        return [with_strides(each, layout["stride"]) for each, layout in zip(found, self.layouts, strict=True)]


@functools.lru_cache(4096)
def _call_of(text: str) -> _DrawingCall:
    """Read a call from its text."""
    said = json.loads(text)
    namespace, packet, overload = said["operator"].split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    arguments, keywords = _literal(said["arguments"]), {name: _literal(each) for name, each in said["keywords"].items()}
    given = dict(zip((each.name for each in schema_of(operator).arguments), arguments, strict=False)) | keywords
    written = (given.get(each.name) for each in schema_of(operator).arguments if is_written(each))
    owned = frozenset(each["read"] for value in written for each in _records(value) if "read" in each)
    layouts = [each for each in (*said["results"], *said["written"]) if each is not None]
    return _DrawingCall(operator, arguments, keywords, owned, _literal(layouts))


def _records(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _records(each)


def _literal(value: Any) -> Any:
    """A value of the text, with torch's objects in place of their names."""
    if isinstance(value, list):
        return [_literal(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "size" in value:
        return {**value, "dtype": getattr(torch, value["dtype"]), "device": torch.device(value["device"])}
    if "device" in value:
        return torch.device(value["device"])
    return next((getattr(torch, value[name]) for name in NAMED if name in value), value)


def _draw(read: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    return _call_of(call).run(read)


def _fake_draw(read: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    return [_empty(layout) for layout in _call_of(call).layouts]


def _empty(layout: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty_strided(layout["size"], layout["stride"], dtype=layout["dtype"], device=layout["device"])


_random = torch.Tag.nondeterministic_seeded
draw_with_inputs = define("draw", "(Tensor[] read, str call) -> Tensor[]", _draw, _random, fake=_fake_draw)
"""(the tensors that a call reads, the call as text) -> its new results, and new values of what it changes.

The tag keeps draws in order: the compiler lets operators that have it follow one another."""
draw_without_inputs = define(
    "draw_without_inputs", "(str call) -> Tensor[]", partial(_draw, ()), _random, fake=partial(_fake_draw, ())
)
"""The same for a call that reads no tensor. Functionalization sees by that, and not by an empty list, that what comes
out is new."""


def run_uncompiled(
    node: fx.Node, operands: Sequence[fx.Node]
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
    """A function that runs a higher-order operator in a compiled program, operator by operator.

    Args:
        node: of a trace.
        operands: the tensors that it is given.

    Returns:
        A function of (the places of the results, the operands).
    """
    target: Any = choose if node.target is torch.ops.higher_order.cond else node.target
    module: Any = node.graph.owning_module
    strides = [each.meta["val"].stride() for each in operands]

    def run(changed: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        lying = [with_strides(each, stride) for each, stride in zip(others, strides, strict=True)]
        given = dict(zip(operands, lying, strict=True))

        def value(each: fx.Node) -> Any:
            return given[each] if each in given else getattr(module, str(each.target))

        made = target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
        for place, result in zip(changed, made if isinstance(made, (list, tuple)) else [made], strict=True):
            place.copy_(result)

    return run
