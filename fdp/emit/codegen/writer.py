"""The state of writing a program: names of values, operators and other objects, and the lines so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fdp.emit.codegen.bindings import bind
from fdp.emit.codegen.lines import Line, ProgramPart
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.savings import NONE
from fdp.pytorch.overloads import OpOverload, boxed_call_of
from fdp.trace.operators.control import choose
from fdp.trace.operators.effects import effects_of


@dataclass
class Writer:
    """The state of writing one program.

    Attributes:
        memory: where values lie, and what is done when.
        rank: this process's rank.
        reserved: what the program calls its own parameters.
        bodies: the programs of the bodies of loops, by node.
        tick: what the program calls to have its parts timed; None for nothing.
        local: the name of each value that has one so far.
        lines: the program so far.
        outputs: the names of what it returns.
        source: its text, once it is put together.
        bound: objects that it uses, by name.
        names: the other way round, by identity.
    """

    memory: MemoryPlan
    rank: int
    reserved: Mapping[str, str]
    bodies: Mapping[str, Any]
    tick: Callable[[], None] | None = None
    local: dict[fx.Node, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    source: str = ""
    bound: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether every operator is called as it was traced, without any saving."""
        return self.memory.savings == NONE


def name_in_program(writer: Writer, node: fx.Node) -> str:
    """The name of a value in the program."""
    return writer.local[writer.memory.value_of(node)]


def names_of_values(writer: Writer, graph: fx.Graph) -> dict[str, str]:
    """Names of values that a program computes as the graph does: neither fused into an addition, nor divided."""
    memory = writer.memory
    apart = {*memory.added.values(), *memory.places.divided}
    found = {node.name: writer.local.get(memory.value_of(node)) for node in graph.nodes if node not in apart}
    return {node: name for node, name in found.items() if name is not None}


def free_name(stem: str, taken: Container[str]) -> str:
    """A name that no value of the graph has: an operator of another library may be called "start"."""
    while stem in taken:
        stem += "_"
    return stem


def bind_object(writer: Writer, value: object, stem: str) -> str:
    """Give an object that has no literal a name in the program, which no value of the graph has."""
    stem = f"const_{stem}"
    known = writer.names.get(id(value))
    if known is None:
        known = stem if stem not in writer.bound else f"{stem}_{len(writer.bound)}"
        writer.bound[known] = value
        writer.names[id(value)] = known
    return known


def bind_operator(writer: Writer, target: object, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> str:
    """Bind the cheapest way to call an operator with arguments of a kind, given as nodes and constants."""
    if isinstance(target, OpOverload):

        def example(node: fx.Node) -> Any:
            return node.meta.get("val")

        if writer.plain:
            function = boxed_call_of(target)
        else:
            function = bind(target, fx.map_arg(args, example), fx.map_arg(dict(kwargs or {}), example))
        stem = str(target).removesuffix(".default").replace(".", "_")
        if writer.bound.setdefault(stem, function) is not function:
            stem = bind_object(writer, function, stem)
        return stem
    if target is torch.ops.higher_order.cond:
        return bind_object(writer, choose, "cond")
    return bind_object(writer, target, getattr(target, "__name__", "operator"))


def literal(writer: Writer, value: object, uses: set[str]) -> str:
    """An argument as text; the names in it are added to `uses`."""
    if isinstance(value, fx.Node):
        name = name_in_program(writer, value)
        uses.add(name)
        return name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(writer, item, uses) for item in value) + "]"
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    return bind_object(writer, value, type(value).__name__.strip("_"))


def emit(writer: Writer, expression: str, uses: set[str], node: fx.Node) -> None:
    """Write a line that computes a node, with a name for its result if anything reads it."""
    defines: tuple[str, ...] = ()
    if node.name in writer.memory.places.named:
        uses.add(node.name)  # changed in place
    elif node.users:
        writer.local[node] = node.name
        defines = (node.name,)
        expression = f"{node.name} = {expression}"
    effects = effects_of(node)
    writer.lines.append(Line(expression, uses, defines, pure=effects.pure and (bool(defines) or effects.view)))


def view_of_input(writer: Writer, target: fx.Node, node: fx.Node, part: ProgramPart | None = None) -> Line:
    """The line that gives a value its name, as a view of the whole donated input that it is computed in."""
    shape, uses = list(node.meta["val"].shape), set[str]()
    view = bind_operator(writer, torch.ops.aten.view.default, (target, shape))
    return Line(f"{node.name} = {view}({literal(writer, target, uses)}, {shape})", uses, (node.name,), part=part)
