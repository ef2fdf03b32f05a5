"""Write the program that carries a plan out: straight-line Python with operators bound to local names.

Generated code calls operators without the layers of Python that `OpOverload.__call__` and `fx.Interpreter` add
(it binds `OpOverload._op`), and drops each value right after its last use.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fdp.emit.donation import Placement, place_outputs
from fdp.emit.views import redundant_views
from fdp.plan import Bucket, Plan, Run, Start
from fdp.trace.effects import effects_of, is_marker, list_arguments, storages_of


@dataclass(frozen=True)
class Program:
    """A generated step.

    Attributes:
        source: its text.
        function: takes a list of input tensors (which it empties), a sequence of buckets, each a list of views to
            fill and a list of results, and the functions `start(k)` and `wait(k)`; returns the list of outputs.
    """

    source: str
    function: Callable[..., list[torch.Tensor]]


@dataclass
class _Line:
    text: str
    uses: set[str]
    defines: tuple[str, ...] = ()
    view: bool = False


@dataclass
class _Writer:
    """The state of writing one program."""

    plan: Plan
    same: Mapping[fx.Node, fx.Node]
    placement: Placement
    local: dict[fx.Node, str] = field(default_factory=dict)
    lines: list[_Line] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    index: dict[fx.Node, int] = field(default_factory=dict)
    last_write: dict[int, int] = field(default_factory=dict)


def write_program(plan: Plan, rank: int, communicates: bool) -> Program:
    """Generate the program of a plan.

    Args:
        plan: the plan.
        rank: this process's rank, for `fdp.axis_index`.
        communicates: False in a world of one, where a mean or sum of one value is that value.

    Returns:
        The program.
    """
    graph = plan.trace.graph.graph
    same = redundant_views(graph)
    writer = _Writer(plan, same, place_outputs(plan, same))
    _index_writes(writer, graph)
    nodes = {node.name: node for node in graph.nodes}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        writer.local[node] = node.name
    for node in graph.nodes:
        if node.op == "get_attr":
            writer.local[node] = _bind(writer, getattr(plan.trace.graph, node.target), "constant")
    buckets = {bucket.index for bucket in plan.buckets if communicates or _is_stacked(bucket)}
    travelling = {member for bucket in plan.buckets if bucket.index in buckets for member in bucket.members}
    alone = {
        plan.trace.operations[r.operation].node: r.operation
        for index, r in enumerate(plan.trace.reductions)
        if r.numel == 0 or index not in travelling
    }
    _copy_back(writer, -1)
    for at, item in enumerate(plan.schedule):
        if isinstance(item, Run):
            operations = [plan.trace.operations[index] for index in item.operations]
            node = nodes[operations[0].node]
            lanes = [operation.lane for operation in operations if operation.lane is not None]
            if node.name in alone:
                _write_alone(writer, node)
            else:
                _write_call(writer, node, lanes, rank)
        else:
            bucket = plan.buckets[item.bucket]
            members = [nodes[plan.trace.operations[plan.trace.reductions[m].operation].node] for m in bucket.members]
            if bucket.index not in buckets:
                if isinstance(item, Start):
                    for node in members:
                        _write_alone(writer, node)
            elif isinstance(item, Start):
                _write_start(writer, bucket, members)
            else:
                _write_wait(writer, bucket, members)
        _copy_back(writer, at)
    outputs = _write_outputs(writer)
    source = _assemble(plan, [writer.local[node] for node in placeholders], writer, outputs, sorted(buckets))
    namespace = dict(writer.bound)
    exec(compile(source, f"<fdp step {plan.trace.name}>", "exec"), namespace)
    return Program(source, namespace["step"])


def _is_stacked(bucket: Bucket) -> bool:
    return bucket.op == "all_gather"


def _resolve(writer: _Writer, node: fx.Node) -> fx.Node:
    node = writer.same.get(node, node)
    return writer.placement.replaced.get(node, node)


def _name(writer: _Writer, node: fx.Node) -> str:
    return writer.local[_resolve(writer, node)]


def _bind(writer: _Writer, value: Any, stem: str) -> str:
    """Give an object that has no literal a name in the program, which no value of the graph has."""
    stem = f"const_{stem}"
    known = writer.names.get(id(value))
    if known is None:
        known = stem if stem not in writer.bound else f"{stem}_{len(writer.bound)}"
        writer.bound[known] = value
        writer.names[id(value)] = known
    return known


def _bind_operator(writer: _Writer, target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        stem = str(target).removesuffix(".default").replace(".", "_")
        if stem not in writer.bound:
            writer.bound[stem] = target._op
        return stem
    if target is torch.ops.higher_order.cond:
        return _bind(writer, _choose, "cond")
    return _bind(writer, target, getattr(target, "__name__", "operator"))


def _choose(condition: torch.Tensor, first: Any, second: Any, operands: Any) -> Any:
    """What torch.cond does when it runs. (Called by itself, the operator leaves Dynamo unable to compile another.)"""
    return first(*operands) if condition else second(*operands)


def _literal(writer: _Writer, value: Any, uses: set[str]) -> str:
    if isinstance(value, fx.Node):
        name = _name(writer, value)
        uses.add(name)
        return name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(writer, item, uses) for item in value) + "]"
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    return _bind(writer, value, type(value).__name__.strip("_"))


def _emit(writer: _Writer, expression: str, uses: set[str], node: fx.Node | None) -> None:
    defines: tuple[str, ...] = ()
    if node is not None and node.users:
        writer.local[node] = node.name
        defines = (node.name,)
        expression = f"{node.name} = {expression}"
    writer.lines.append(_Line(expression, uses, defines, view=node is not None and effects_of(node).view))


def _write_call(writer: _Writer, node: fx.Node, lanes: list[int], rank: int) -> None:
    if node in writer.same or node in writer.placement.replaced:
        return
    uses: set[str] = set()
    if node.target is operator.getitem:
        sequence, index = node.args
        if writer.local.get(sequence) is None:  # type: ignore[arg-type]
            # One entry of a call whose lanes ran apart: each lane has its own name.
            writer.local[node] = f"{sequence.name}_lane{index}"  # type: ignore[union-attr]
            return
        _emit(writer, f"{_literal(writer, sequence, uses)}[{index!r}]", uses, node)
        return
    if is_marker(node, "vary"):
        _emit(writer, f"{_bind_operator(writer, torch.ops.aten.clone.default)}({_literal(writer, node.args[0], uses)})",
              uses, node)  # fmt: skip
        return
    if is_marker(node, "axis_index"):
        constant = _bind(writer, torch.tensor(rank, dtype=torch.int64), "axis_index")
        _emit(writer, f"{_bind_operator(writer, torch.ops.aten.clone.default)}({constant})", uses, node)
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    split = bool(lanes) and len(lanes) < _lane_count(node)
    if split:
        for argument, value in list_arguments(node):
            if value:
                chosen = [value[lane] for lane in lanes]
                if argument.name in kwargs:
                    kwargs[argument.name] = chosen
                else:
                    args[_position(node, argument.name)] = chosen
    parts = [_literal(writer, value, uses) for value in args]
    parts += [f"{key}={_literal(writer, value, uses)}" for key, value in kwargs.items()]
    call = f"{_bind_operator(writer, node.target)}({', '.join(parts)})"
    if split and node.users:
        targets = tuple(f"{node.name}_lane{lane}" for lane in lanes)
        writer.lines.append(_Line(f"({', '.join(targets)},) = {call}", uses, targets))
    else:
        _emit(writer, call, uses, node)


def _lane_count(node: fx.Node) -> int:
    return max(len(value) for _, value in list_arguments(node))


def _position(node: fx.Node, name: str) -> int:
    schema: Any = node.target
    return [argument.name for argument in schema._schema.arguments].index(name)


def _write_alone(writer: _Writer, node: fx.Node) -> None:
    """A reduction that sends nothing: of one rank, or of no elements."""
    uses: set[str] = set()
    value = node.meta["val"]
    if value.numel() == 0:
        shape, device = list(value.shape), _bind(writer, value.device, "device")
        dtype = _bind(writer, value.dtype, "dtype")
        _emit(writer, f"{_bind_operator(writer, torch.ops.aten.empty.memory_format)}({shape}, dtype={dtype}, "
              f"device={device})", uses, node)  # fmt: skip
        return
    source: Any = node.args[0]
    name = _literal(writer, source, uses)
    if _may_alias(writer, node, source):
        writer.local[node] = name
    else:
        format_ = _bind(writer, torch.contiguous_format, "contiguous_format")
        clone = _bind_operator(writer, torch.ops.aten.clone.default)
        _emit(writer, f"{clone}({name}, memory_format={format_})", uses, node)


def _may_alias(writer: _Writer, node: fx.Node, source: fx.Node) -> bool:
    """Whether the result of a reduction over one rank may be its argument itself: nobody changes either later."""
    own, other = storages_of(node), storages_of(source)
    return (
        source.meta["val"].is_contiguous()
        and not any(storage in writer.last_write for storage in own)
        and not any(writer.last_write.get(storage, -1) > writer.index[node] for storage in other)
    )


def _index_writes(writer: _Writer, graph: fx.Graph) -> None:
    """Note when, in the order of the user's program, each piece of memory is last written."""
    for index, node in enumerate(graph.nodes):
        writer.index[node] = index
        if node.op in ("placeholder", "get_attr"):
            # It may be written at any time after: by its owner, or when the new state is copied into it.
            writer.last_write.update(dict.fromkeys(storages_of(node), len(graph.nodes)))
        for target in effects_of(node).writes:
            for storage in storages_of(target):
                writer.last_write[storage] = max(index, writer.last_write.get(storage, -1))


def _write_start(writer: _Writer, bucket: Bucket, members: list[fx.Node]) -> None:
    uses: set[str] = set()
    pieces = [_literal(writer, node.args[0], uses) for node in members]
    pack = f"pack{bucket.index}"
    if len(pieces) == 1:
        copy = _bind_operator(writer, torch.ops.aten.copy_.default)
        writer.lines.append(_Line(f"{copy}({pack}[0], {pieces[0]})", uses))
    else:
        copy = _bind_operator(writer, torch.ops.aten._foreach_copy_.default)
        writer.lines.append(_Line(f"{copy}({pack}, [{', '.join(pieces)}])", uses))
    writer.lines.append(_Line(f"start({bucket.index})", set()))


def _write_wait(writer: _Writer, bucket: Bucket, members: list[fx.Node]) -> None:
    names = tuple(node.name for node in members)
    for node in members:
        writer.local[node] = node.name
    writer.lines.append(_Line(f"wait({bucket.index})", set()))
    writer.lines.append(_Line(f"({', '.join(names)},) = result{bucket.index}", set(), names))


def _copy_back(writer: _Writer, at: int) -> None:
    for target, node in writer.placement.copies.get(at, ()):
        uses: set[str] = set()
        copy = _bind_operator(writer, torch.ops.aten.copy_.default)
        text = f"{copy}({_literal(writer, target, uses)}, {_literal(writer, node, uses)})"
        writer.lines.append(_Line(text, uses))


def _write_outputs(writer: _Writer) -> list[str]:
    outputs = []
    for position, node in enumerate(writer.placement.returned):
        name = _name(writer, node)
        if position in writer.placement.cloned:
            clone = _bind_operator(writer, torch.ops.aten.clone.default)
            writer.lines.append(_Line(f"output_{position} = {clone}({name})", {name}, (f"output_{position}",)))
            name = f"output_{position}"
        outputs.append(name)
    return outputs


def _assemble(plan: Plan, inputs: list[str], writer: _Writer, outputs: list[str], buckets: list[int]) -> str:
    """Put the lines together, and after each the names that nobody needs any more."""
    _drop_unused_views(writer, outputs)
    last: dict[str, int] = {}
    for index, line in enumerate(writer.lines):
        for name in (*line.uses, *line.defines):
            last[name] = index
    keep = {*outputs, *writer.bound}
    body = []
    if inputs:
        body += [f"({', '.join(inputs)},) = inputs", "inputs.clear()"]
        unused = [name for name in inputs if name not in last and name not in keep]
        if unused:
            body.append("del " + ", ".join(unused))
    for k in buckets:
        body.append(f"pack{k}, result{k} = buckets[{k}]")
    for index, line in enumerate(writer.lines):
        body.append(line.text)
        dead = sorted(n for n in line.uses.union(line.defines) if last[n] == index and n not in keep)
        if dead:
            body.append("del " + ", ".join(dead))
    body.append(f"return [{', '.join(outputs)}]")
    # Operators as default values: a local name is the cheapest thing to look up.
    bound = ", ".join(f"{name}={name}" for name in writer.bound)
    head = f"def step(inputs, buckets, start, wait{', *, ' + bound if bound else ''}):"
    return "\n    ".join([head, *body]) + "\n"


def _drop_unused_views(writer: _Writer, outputs: list[str]) -> None:
    """Leave out views that only led to views which are their own base."""
    needed = set(outputs)
    kept = []
    for line in reversed(writer.lines):
        if not line.view or needed.intersection(line.defines):
            needed |= line.uses
            kept.append(line)
    writer.lines = kept[::-1]
