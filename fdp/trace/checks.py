"""What a traced step must not do: train closed-over parameters, change its inputs, read unset memory.

Each check looks at the whole graph and names every offender.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.errors import PurityError, ReplicationError, TraceError, build_message
from fdp.trace.capture import is_fake
from fdp.trace.effects import effects_of, inner_nodes, is_marker, replaces_elements, storages_of, taken_for_shape
from fdp.trace.overlap import memory_groups, reaches_beyond
from fdp.trace.rng_replay import STATE, drawn_anew
from fdp.trace.source import located
from fdp.trace.trace import Input, Output
from fdp.trace.variance import Cause


def check_closure(name: str, graph_module: fx.GraphModule, names: Mapping[int, str]) -> None:
    """Refuse a step that uses parameters which are not among its arguments.

    Raises:
        PurityError: names each of them.
    """
    offenders: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        tensor = getattr(graph_module, node.target, None) if node.op == "get_attr" else None
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            known = names.get(id(tensor), f"a parameter of shape {list(tensor.shape)}")
            user = next(iter(node.users), None)
            line = user.meta.get("source") if user is not None else None
            offenders.setdefault(
                known, f"{known}: {list(tensor.shape)} {tensor.dtype}" + (f", used at {line}" if line else "")
            )
    if offenders:
        raise PurityError(
            build_message(
                f"step {name!r} uses parameters that are not among its arguments; they would be frozen into the "
                "trace and never train.",
                offenders.values(),
                remedy="pass them in: apply, params, buffers = fdp.from_module(model), or "
                "torch.func.functional_call(model, params, ...); a model that is not to be trained needs "
                "requires_grad_(False).",
            )
        )


def check_made_here(name: str, graph_module: fx.GraphModule, names: Mapping[int, str]) -> None:
    """Refuse a step that uses a tensor of a trace that was made unseen: in a thread, or in an earlier trace.

    Raises:
        TraceError: names each of them, and the line where it is used.
    """
    offenders = []
    for node in graph_module.graph.find_nodes(op="get_attr"):
        tensor: Any = getattr(graph_module, str(node.target), None)
        if is_fake(tensor):
            user = next(iter(node.users), None)
            line = user.meta.get("source") if user is not None else None
            known = names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")
            offenders.append(known + (f", used at {line}" if line else ""))
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} uses tensors that were made out of the trace's sight: in another thread, or in an "
                "earlier trace and kept.",
                offenders,
                remedy="compute in the thread that called the step; make tables before the first call, or in every "
                "call; what a step is to keep, it returns.",
            )
        )


def check_shapes(name: str, graph: fx.Graph) -> None:
    """Refuse tensors whose length is a number that is read from another: the results of each turn of a while_loop.

    Raises:
        TraceError: names each operator that makes one, and the line.
    """

    def is_open(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(is_open, value))
        return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)

    offenders = {
        located(node): None
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and is_open(node.meta.get("val"))
    }
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} makes tensors whose shape depends on the values of others, as a while_loop that is "
                "differentiated does.",
                offenders,
                remedy="give shapes as Python numbers, and mask what is too much; differentiate loops of a known "
                "length: a Python loop, which is unrolled into the graph, or associative_scan.",
            )
        )


def check_writes(name: str, graph_module: fx.GraphModule, inputs: Sequence[Input], names: Mapping[int, str]) -> None:
    """Refuse a step that changes, in place, an input that it was not given for good, or a closed-over tensor.

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
    """Refuse a step that reads memory which nothing has been written to.

    Raises:
        TraceError: names each operator that reads it, and the line.
    """
    unset: dict[int, fx.Node] = {}
    offenders = []
    for node in graph.nodes:
        effects, harmless = effects_of(node), taken_for_shape(node)
        for argument in node.all_input_nodes if node.op == "output" else effects.reads:
            if argument in effects.writes and replaces_elements(node):
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


def check_branches(name: str, graph: fx.Graph) -> None:
    """Refuse collectives inside torch.cond and the like: ranks that take different branches would not meet.

    Raises:
        TraceError: names each operator that holds one, and the line.
    """
    offenders = [
        located(node)
        for node in graph.nodes
        if node.op == "call_function" and any(is_marker(inner) for inner in inner_nodes(node))
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} has collectives or gradients of fdp in a branch or loop that runs by the value of a "
                "tensor; ranks that go different ways would wait for each other for ever.",
                offenders,
                remedy="put fdp.pmean and fdp.grad outside of torch.cond, and choose between their results with "
                "torch.where.",
            )
        )


def check_recomputation(name: str, graph: fx.Graph) -> None:
    """Refuse random numbers that are drawn in a backward pass: recomputed dropout that drops other units.

    Raises:
        TraceError: names each operator that draws, and the line.
    """
    offenders = [located(node) for node in drawn_anew(graph) if node.target is not STATE]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} draws random numbers again in a backward pass, and they would not be those of the "
                "forward pass.",
                offenders,
                remedy="call torch.utils.checkpoint.checkpoint without preserve_rng_state=False; what comes "
                "from a generator of your own, draw before the checkpointed function, and pass it.",
            )
        )


def check_views(name: str, graph: fx.Graph) -> None:
    """Refuse views at a place that is read from a tensor: what varies is known of memory, not of places in it.

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
    """Refuse views by a place in the memory of an input that begins in the middle of it: in a trace all begin at 0.

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
    """Refuse views by places in the memory of an input that are none of its elements.

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
    """Refuse a closed-over tensor that lies in the memory of a donated input: it would change with the state.

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


def check_devices(name: str, graph: fx.Graph) -> None:
    """Refuse a step that makes tensors on a device which this machine does not have.

    Raises:
        TraceError: names each operator that does, and the line.
    """
    missing: dict[str, str] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            kind = value.device.type
            if kind not in ("cpu", "meta") and kind not in missing and not _available(value.device):
                missing[kind] = f"{value.device}: {located(node)}"
    if missing:
        raise TraceError(
            build_message(
                f"step {name!r} makes tensors on a device that this process cannot use.",
                missing.values(),
                remedy="make tensors where the inputs are: device=x.device.",
            )
        )


def check_outputs(name: str, outputs: Sequence[Output], causes: Mapping[str, Cause], labels: Mapping[str, str]) -> None:
    """Refuse a step that returns, undeclared, a value which may differ from rank to rank.

    Args:
        name: the user's function.
        outputs: every leaf that the step returns.
        causes: for the name of each varying output, why it varies.
        labels: what the inputs are, with key paths, by the name of their node.

    Raises:
        ReplicationError: names each of them with shape, dtype, operation and line.
    """
    offenders, drawn = [], False
    for output in outputs:
        if not output.varying or output.per_rank or output.labelled:
            continue
        cause = causes[output.name]
        origin = cause.last
        if origin.op == "placeholder":
            why = f"is the {labels[origin.name]} itself"
        else:
            source = origin.meta.get("source")
            why = f"last varied in {origin.target}" + (f" at {source}" if source else "")
            if cause.draw is not None:
                drawn = True
                why += "" if cause.draw is origin else f", only by the random numbers of {located(cause.draw)}"
        assert output.shape is not None
        offenders.append(f"{output.name}: {list(output.shape)} {output.dtype}, {why}")
    if offenders:
        raise ReplicationError(
            build_message(
                f"step {name!r} returns values that may differ from rank to rank.",
                offenders,
                remedy="average them with fdp.pmean (or fdp.psum, fdp.pmax, fdp.broadcast); "
                + ("draw what is to be equal on all ranks with fdp.random; " if drawn else "")
                + "declare those that are meant to differ with fdp.per_rank.",
            )
        )


def _available(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available"):
        return False
    return bool(module.is_available()) and (device.index or 0) < int(module.device_count())
