"""What a traced step must not do with memory: change what it does not own, read what is unset, reach beyond a tensor.

Each check looks at the whole graph and names every offender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fdp.errors import PurityError, TraceError, build_message
from fdp.trace.calls.overlap import memory_groups, reaches_beyond
from fdp.trace.operators.effects import effects_of, read_for_shape_only, replaces_elements, storages_of
from fdp.trace.operators.source import located
from fdp.trace.trace import Input


def check_writes(name: str, graph_module: fx.GraphModule, inputs: Sequence[Input], names: Mapping[int, str]) -> None:
    """Refuse a step that changes an input that is not donated, or a closed-over tensor, in place.

    Raises:
        PurityError: names each of them, with the operator and the line.
    """
    protected: dict[int, str] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, item in zip(placeholders, inputs, strict=True):
        if not item.donated:
            protected.update(dict.fromkeys(storages_of(node), item.name))
        elif item.shares_memory:
            known = f"{item.name} (donated, but it shares memory with another leaf or with itself: pass a clone)"
            protected.update(dict.fromkeys(storages_of(node), known))
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(graph_module, node.target, None)
            known = names.get(id(tensor), f"a closed-over tensor of shape {list(getattr(tensor, 'shape', ()))}")
            protected.update(dict.fromkeys(storages_of(node), known))
    offenders: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        for target in effects_of(node).writes:
            for storage in storages_of(target):
                if storage in protected:
                    victim = protected[storage]
                    offenders.setdefault(victim, f"{victim}: {located(node)}")
    if offenders:
        raise PurityError(
            build_message(
                f"step {name!r} changes tensors that it does not own.",
                offenders.values(),
                remedy="compute a new value and return it (x + 1, not x.add_(1)); or let the step have the argument "
                "with donate_argnums; statistics of BatchNorm come out of fdp.from_module's apply.",
            )
        )


def check_initialised(name: str, graph: fx.Graph) -> None:
    """Refuse a step that reads uninitialised memory.

    Raises:
        TraceError: names each operator that reads it, and the line.
    """
    unset: dict[int, fx.Node] = {}
    offenders = []
    for node in graph.nodes:
        effects, harmless = effects_of(node), read_for_shape_only(node)
        for argument in node.all_input_nodes if node.op == "output" else effects.reads:
            if argument in effects.written_nodes and replaces_elements(node):
                continue  # those that it does not replace hold what they held, as with a copy into a part
            if argument in harmless:
                continue
            for storage in storages_of(argument):
                if storage in unset and argument.meta["val"].numel():
                    maker = unset.pop(storage)
                    where = "the step's output" if node.op == "output" else str(node.target)
                    offenders.append(f"{located(maker)}, read by {where}")
        for target in effects.writes:
            for storage in storages_of(target):
                unset.pop(storage, None)
        if effects.uninitialised:
            unset.update(dict.fromkeys(storages_of(node), node))
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} reads uninitialised memory; or an operator hides from the trace how it fills it.",
                offenders,
                remedy="fill the tensor first (torch.zeros); pass lengths and the like as tensors, not as Python "
                "numbers.",
            )
        )


def check_views(name: str, graph: fx.Graph) -> None:
    """Refuse views whose offset is read from a tensor: what varies is known for whole storages, not for parts of them.

    Raises:
        TraceError: names each such view, and the line.
    """
    offenders = [
        located(node)
        for node in graph.nodes
        if node.op == "call_function"
        and effects_of(node).view
        and any(isinstance(a.meta.get("val"), (torch.SymInt, torch.SymFloat)) for a in node.all_input_nodes)
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} takes a slice at a place that it reads from a tensor.",
                offenders,
                remedy="index with the tensor itself: torch.index_select(x, 0, i), or x[i] for an index tensor i.",
            )
        )


def check_places(name: str, graph: fx.Graph, inputs: Sequence[Input]) -> None:
    """Refuse `as_strided` of an input with a storage offset: in a trace all offsets are 0.

    Raises:
        TraceError: names each such view, and the line.
    """
    placeholders = graph.find_nodes(op="placeholder")
    inside = {
        storage for node, item in zip(placeholders, inputs, strict=True) if item.offset for storage in storages_of(node)
    }
    offenders = [
        located(node)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
        if len(node.args) > 3 and node.args[3] is not None and not inside.isdisjoint(storages_of(node))
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} looks at an argument by its place in memory, and that argument begins in the middle of "
                "its memory.",
                offenders,
                remedy="leave storage_offset out of as_strided, which is then that of the tensor itself; use ordinary "
                "views; or pass a clone of the argument.",
            )
        )


def check_gaps(name: str, graph: fx.Graph, inputs: Sequence[Input]) -> None:
    """Refuse `as_strided` of an input that reaches storage between or behind its elements.

    What lies there belongs to no argument: in a caller's tensor it may be anything, in a step's result it is unset.

    Raises:
        TraceError: names each such view, and the line.
    """
    wholes: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        for storage in storages_of(node):
            wholes.setdefault(storage, []).append((item.name, node.meta["val"]))
    offenders = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        found = [each for storage in storages_of(node) for each in wholes.get(storage, ())]
        if found and all(reaches_beyond(node.meta["val"], whole) for _, whole in found):
            offenders.append(f"{found[0][0]}: {located(node)}")
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} looks at places between or behind the elements of an argument; what lies there belongs "
                "to no argument.",
                offenders,
                remedy="pass the whole tensor, and take what you need of it in the step.",
            )
        )


def check_closure_memory(
    name: str,
    graph_module: fx.GraphModule,
    inputs: Sequence[Input],
    tensors: Sequence[torch.Tensor],
    names: Mapping[int, str],
) -> None:
    """Refuse a closed-over tensor that shares memory with a donated input: it would change with the state.

    Raises:
        PurityError: names both.
    """
    donated = [(item.name, tensor) for item, tensor in zip(inputs, tensors, strict=True) if item.donated]
    attributes = (getattr(graph_module, node.target) for node in graph_module.graph.find_nodes(op="get_attr"))
    held = [value for value in attributes if isinstance(value, torch.Tensor) and value.layout == torch.strided]
    groups = memory_groups([*(tensor for _, tensor in donated), *held])
    owners = dict(zip(reversed(groups[: len(donated)]), reversed([known for known, _ in donated]), strict=True))
    offenders = {
        f"{names.get(id(tensor), 'a closed-over tensor')} lies in the memory of {owners[group]}": None
        for tensor, group in zip(held, groups[len(donated) :], strict=True)
        if group in owners
    }
    if offenders:
        raise PurityError(
            build_message(
                f"step {name!r} closes over tensors that share memory with donated state.",
                offenders,
                remedy="clone the closed-over tensor; or do not donate.",
            )
        )
