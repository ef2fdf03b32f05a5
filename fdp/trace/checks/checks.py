"""What a traced step must not do (memory apart): train closed-over parameters, branch on values, and the like.

Each check looks at the whole graph and names every offender.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.distributed.mesh import WHOLE
from fdp.errors import PurityError, ReplicationError, TraceError, build_message
from fdp.trace.capture.capture import is_fake
from fdp.trace.capture.rng_replay import STATE, drawn_anew
from fdp.trace.graph.variance import Cause
from fdp.trace.operators.effects import inner_nodes, is_marker
from fdp.trace.operators.source import located
from fdp.trace.trace import Output


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
    """Refuse a step that uses a fake tensor which this trace did not record: from a thread, or an earlier trace.

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
    """Refuse tensors whose length is read from another tensor, such as the stacked results of a while_loop.

    Raises:
        TraceError: names each operator that makes one, and the line.
    """

    def is_open(value: object) -> bool:
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


_LABEL = (
    "declare metrics that are meant to differ with fdp.per_rank; label state that is each rank's own outside of the "
    "step, before its first call: state[...] = fdp.per_rank(state[...])."
)
"""What to do about results that take the place of state, and that differ."""


def _below(path: str) -> str:
    """A key path without what its first key lies in."""
    return path[path.index("[") :] if "[" in path else ""


def check_outputs(
    name: str,
    outputs: Sequence[Output],
    causes: Mapping[str, Cause],
    labels: Mapping[str, str],
    state: Sequence[str],
    only_batches: bool = False,
) -> None:
    """Refuse a step that returns, undeclared, a value which may differ from rank to rank.

    Args:
        name: the user's function.
        outputs: every leaf that the step returns.
        causes: for the name of each varying output, why it varies.
        labels: what the inputs are, with key paths, by the name of their node.
        state: the key paths of inputs that are replicated state.
        only_batches: whether every argument is a batch; perhaps the last one is by default, and is meant to be state.

    Raises:
        ReplicationError: names each of them with shape, dtype, operation and line.
    """
    offenders, drawn, of_inputs, carries_on = [], False, False, False
    paths = {_below(path) for path in state} - {""}
    for output in outputs:
        if not output.varying or output.per_rank or output.labelled:
            continue
        cause = causes[output.name]
        origin = cause.last
        of_inputs |= cause.draw is None
        below = _below(output.name)
        carries_on |= below in paths or _below(below[1:]) in paths
        if origin.op == "placeholder":
            why = f"is the {labels[origin.name]} itself"
        else:
            source = origin.meta.get("source")
            why = f"last varied in {origin.target}" + (f" at {source}" if source else "")
            if cause.draw is not None:
                drawn = True
                why += "" if cause.draw is origin else f", only by the random numbers of {located(cause.draw)}"
        if WHOLE not in cause.along:
            why += f"; may differ along {' and '.join(sorted(cause.along))}"
        assert output.shape is not None
        offenders.append(f"{output.name}: {list(output.shape)} {output.dtype}, {why}")
    if offenders:
        raise ReplicationError(
            build_message(
                f"step {name!r} returns values that may differ from rank to rank.",
                offenders,
                remedy="average them with fdp.pmean (or fdp.psum, fdp.pmax, fdp.broadcast); "
                + ("draw what is to be equal on all ranks with fdp.random; " if drawn else "")
                + ("pass batch_argnums=() if no argument is a batch; " if only_batches and of_inputs else "")
                + (_LABEL if carries_on else "declare those that are meant to differ with fdp.per_rank."),
            )
        )


def _available(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available"):
        return False
    return bool(module.is_available()) and (device.index or 0) < int(module.device_count())
