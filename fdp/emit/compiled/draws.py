"""Random draws in a compiled step, each as a call whose strides and place in the order a compiler cannot change.

Which number an operator draws for which element depends on how the elements lie in memory. A compiler lays values out
as it likes. So a draw becomes a call of an operator of `drawing`. A text says what the step itself calls, and the
strides of all tensors that this call reads, fills and returns. A tensor that has other strides at run time is copied to
these first.

A condition, or another function of functions, in which anything is drawn is not compiled at all: a compiler would lay
out what is in it, and keep no order between its draws and others. It runs operator by operator, as loops run apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.drawing import NAMED, is_written
from fdp.emit.memory.elements import offsets
from fdp.errors import CompileError, build_message
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.pytorch.tensors import generator_id
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import bound_arguments, effects_of, nodes_in, operator_name, storages_of

_LIKE = ("rand_like", "randn_like", "randint_like")
"""Operators that read only shape, dtype and strides of their first argument."""


def draws(node: fx.Node) -> bool:
    """Whether a node of a trace is an operator that draws. (Replays of a state are not.)"""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace.startswith("fdp"):
        return False
    return effects_of(node).random


def functions_that_draw(module: fx.GraphModule) -> list[fx.Node]:
    """The higher-order operators of a trace whose functions draw. (Loops of fdp's own are programs of their own.)"""
    called = [node for node in module.graph.nodes if node.op == "call_function" and not is_loop(node)]
    return [node for node in called if not isinstance(node.target, OpOverload) and effects_of(node).random]


def generators_of(module: fx.GraphModule) -> list[torch.Generator]:
    """The generators that a trace draws from besides torch's own, in the order in which `draw` numbers them."""
    held = (getattr(module, str(node.target), None) for node in module.graph.find_nodes(op="get_attr"))
    # The same one may be another object.
    found = {generator_id(each): each for each in held if isinstance(each, torch.Generator)}
    return list(found.values())


@dataclass(frozen=True)
class Draw:
    """The call that replaces a node which draws.

    Attributes:
        text: the argument `call` of `draw`.
        read: the tensors that it is given.
        written: what the node changes; `draw` returns them anew, behind its other results.
        results: for each result of the node, ("made", its number in what `draw` returns), ("changed", the node that it
            is), or ("known", what it is), if it is no tensor.
    """

    text: str
    read: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]
    results: tuple[tuple[str, Any], ...]


def describe_draw(node: fx.Node) -> Draw:
    """Describe the draw of a node as text, for an operator of `drawing`.

    Raises:
        CompileError: it is given a number that is read from a tensor, or it draws into memory that it reads otherwise.
    """
    target: Any = node.target
    bound = list(bound_arguments(node))
    read: dict[fx.Node, int] = {}
    for schema, value in bound:
        for each in _tensors_in(value):
            if _is_read(node, schema, each) and not any(_same_elements(each, other) for other in read):
                read[each] = len(read)
    written = [each for schema, value in bound if is_written(schema) for each in _tensors_in(value)]
    if any(_overlap(one, two) for one in written for two in (*read, *written)):
        raise _refusal(node, "draws into memory that it reads", "draw into a clone.")
    arguments = [_encoded(node, value, read) for value in node.args]
    keywords = {name: _encoded(node, value, read) for name, value in node.kwargs.items()}
    owners = {
        name: value for schema, value in bound if is_written(schema) for name in schema.alias_info.before_set
    }  # fmt: skip
    results: list[tuple[str, Any]] = []
    layouts: list[dict[str, Any] | None] = []
    count, example = 0, node.meta["val"]
    returned: list[Any] = schema_of(target).returns
    examples = [example] if len(returned) == 1 else example
    for schema, each in zip(returned, examples, strict=True):
        if is_written(schema):
            results.append(("changed", next(owners[name] for name in schema.alias_info.before_set)))
        elif isinstance(each, torch.Tensor):
            results.append(("made", count))
            layouts.append(_layout_record(each))
            count += 1
        else:
            results.append(("known", each))
            layouts.append(None)
    text = {
        "operator": str(target),
        "arguments": arguments,
        "keywords": keywords,
        "results": layouts,
        "written": [_layout_record(each.meta["val"]) for each in written],
    }
    return Draw(json.dumps(text), tuple(read), tuple(written), tuple(results))


def _encoded(node: fx.Node, value: Any, read: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_encoded(node, each, read) for each in value]
    if isinstance(value, fx.Node):
        example = value.meta.get("val")
        if isinstance(example, torch.Tensor):
            known = next((at for each, at in read.items() if _same_elements(each, value)), None)
            return (
                _layout_record(example)
                if known is None
                else {"read": known, "stride": _strides_with_small_gaps(example)}
            )
        module: Any = node.graph.owning_module
        value = getattr(module, str(value.target), None) if value.op == "get_attr" else value
        if isinstance(value, torch.Generator):
            known_as = [generator_id(each) for each in generators_of(module)]
            return {"generator": known_as.index(generator_id(value))}
    for name, kind in NAMED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _refusal(node, "is given a number that is read from a tensor", "draw with numbers that Python knows.")


def _layout_record(example: torch.Tensor) -> dict[str, Any]:
    """What `drawing` needs to make a tensor of this layout: size, strides, dtype and device."""
    kind = {"dtype": str(example.dtype).removeprefix("torch."), "device": str(example.device)}
    return {"size": list(example.shape), "stride": _strides_with_small_gaps(example), **kind}


def _strides_with_small_gaps(example: torch.Tensor) -> list[int]:
    """The strides of a tensor, with gaps of one element where it has larger ones.

    Operators see in which order elements lie, and whether there are gaps, and not how wide these are. A column of a
    large matrix need not be drawn into another large matrix.
    """
    stride = list(example.stride())
    end = new_end = 1
    for step, at in sorted((step, at) for at, step in enumerate(stride) if example.shape[at] != 1):
        if step < end:
            return list(example.stride())  # elements share memory
        stride[at] = new_end + (step != end)
        end, new_end = step * example.shape[at], stride[at] * example.shape[at]
    return stride


def _is_read(node: fx.Node, schema: Any, given: fx.Node) -> bool:
    """Whether what a node draws depends on the values of an argument."""
    effects = effects_of(node)
    if given not in effects.reads:
        return False
    if is_written(schema):
        return not (effects.overwrites or schema.is_out)
    return not (schema.name == "self" and operator_name(node) in _LIKE)


def _tensors_in(value: Any) -> Iterator[fx.Node]:
    return (node for node in nodes_in(value) if isinstance(node.meta.get("val"), torch.Tensor))


def _same_elements(one: fx.Node, two: fx.Node) -> bool:
    """Whether two nodes have the same elements of one storage, in the same order."""
    if storages_of(one) != storages_of(two):
        return False
    a, b = one.meta["val"], two.meta["val"]
    return (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


def _overlap(one: fx.Node, two: fx.Node) -> bool:
    """Whether two nodes share some elements of one storage, but not all in the same order."""
    if one is two or storages_of(one) != storages_of(two) or _same_elements(one, two):
        return False
    a, b = one.meta["val"], two.meta["val"]
    return a.dtype != b.dtype or bool(torch.isin(_storage_positions(a), _storage_positions(b)).any())


def _storage_positions(example: torch.Tensor) -> torch.Tensor:
    return offsets(example.shape, example.stride()) + int(example.storage_offset())


def _refusal(node: fx.Node, what: str, remedy: str) -> CompileError:
    return CompileError(
        build_message(
            f"{node.target} {what}, which a compiled step cannot do.",
            [str(node.meta.get("source") or "at an unknown line")],
            remedy=f"{remedy.removesuffix('.')}; compile=False runs it as it is.",
        )
    )


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a higher-order operator.

    Raises:
        CompileError: it is given, or returns, a number that is read from a tensor.
    """
    given = [each for each in node.all_input_nodes if each.op != "get_attr" or _is_tensor(each)]
    example: Any = node.meta["val"]
    results = example if isinstance(example, (list, tuple)) else [example]
    if not all(map(_is_tensor, given)) or not all(isinstance(each, torch.Tensor) for each in results):
        raise _refusal(node, "draws, and takes or returns a number", "take a tensor.")
    return given


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
