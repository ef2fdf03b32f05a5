"""From a step and example arguments to a `Trace`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fdp import pytree
from fdp.context.labelled import labelled_state
from fdp.distributed.comparable import comparable
from fdp.distributed.group import Group
from fdp.distributed.mesh import dimension_of
from fdp.distributed.wire import Wire
from fdp.errors import FdpError
from fdp.state.containers import LeafPlace, Role, bare_spec, places_in, with_containers
from fdp.trace.calls.arguments import Flat, Roles, describe_inputs
from fdp.trace.calls.closure import closed_over_names, closed_over_tensors
from fdp.trace.calls.pairing import assign_containers, assign_slots
from fdp.trace.calls.results import plain, refuse_foreign_outputs
from fdp.trace.capture.calling import call_with, name_of_step, runs_untraced
from fdp.trace.capture.capture import capture, untraceable
from fdp.trace.capture.lists import take_lists_apart
from fdp.trace.capture.reshapes import reshape_by_views
from fdp.trace.capture.untouched import check_untouched, untouched
from fdp.trace.checks.checks import (
    check_branches,
    check_closure,
    check_devices,
    check_made_here,
    check_outputs,
    check_recomputation,
    check_shapes,
)
from fdp.trace.checks.memory_checks import (
    check_closure_memory,
    check_gaps,
    check_initialised,
    check_places,
    check_views,
    check_writes,
)
from fdp.trace.graph.dependencies import operations_of
from fdp.trace.graph.loops import loops_of, outline_loops
from fdp.trace.graph.replicated import closed_over, replicated_calls
from fdp.trace.graph.variance import Cause, varying_nodes
from fdp.trace.graph.wire_cast import cast_early, is_wire_cast
from fdp.trace.operators.effects import bound_arguments, collective_of, is_marker
from fdp.trace.sharding.sharded import examples_of, for_one_rank, refuse_held, whole_inputs
from fdp.trace.trace import Input, Operation, Output, Reduction, Trace

Choice = Callable[[Callable[[frozenset[str]], Trace]], Trace]
"""Chooses the trace of a step with sharded state. It may ask for several, each by the names of the nodes, in the graph
on whole values, whose values are gathered again in each forward and backward pass; others are gathered once. It asks
for the trace that gathers nothing again first."""


def gather_once(trace: Callable[[frozenset[str]], Trace]) -> Trace:
    """The trace of a step that gathers nothing again."""
    return trace(frozenset())


def trace_step(
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    group: Group,
    check_replication: bool = True,
    wire: Wire | None = None,
    choose: Choice = gather_once,
) -> Trace:
    """Trace a step on the shapes of example arguments; nothing is run and nothing is sent.

    Args:
        step: the user's function.
        flat: its flattened arguments.
        roles: what each argument is to it.
        group: the ranks that it is to run on.
        check_replication: whether outputs must be equal on every rank unless declared.
        wire: in which dtype gradients are sent; None for their own.
        choose: says which sharded state is gathered again for the backward pass; by default none is.

    Returns:
        The trace.

    Raises:
        TraceError: the step cannot be traced, or was given leaves that it cannot take.
        PurityError: it changes an input in place, or uses parameters that are not among its arguments.
        ReplicationError: it returns a value that may differ from rank to rank.
    """
    name = name_of_step(step)
    names, inputs = describe_inputs(name, flat, roles, group)
    whole = whole_inputs(inputs, flat)
    captured = _captured(name, step, flat, roles, group, wire, whole)
    graph, out_spec = captured.module.graph, captured.out_spec
    placeholders = graph.find_nodes(op="placeholder")
    may_differ = [node for node, item in zip(placeholders, whole, strict=True) if not item.replicated]
    varying = varying_nodes(graph, may_differ, group.sizes)
    outputs, sources = _returned(name, captured, whole, varying, flat, roles, check_replication)

    def traced(
        module: fx.GraphModule,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        in_spec: pytree.Spec,
        out_spec: pytree.Spec,
    ) -> Trace:
        outline_loops(name, module)
        operations, reductions = _operations(module.graph)
        return Trace(
            name=name,
            source=_definition(step),
            world_size=group.size,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            operations=tuple(operations),
            reductions=tuple(reductions),
            replicated_constants=tuple(_constants(names, flat, roles)),
            closed_over=tuple(closed_over(module, captured.closure)),
            graph=module,
            wire=wire,
            loops=tuple(loops_of(name, module)),
            replicated_calls=(),
            in_spec=in_spec,
            out_spec=out_spec,
            dimensions=group.sizes,
        )

    spec = with_containers(out_spec, _around(flat, sources))
    if all(item.part is None for item in inputs):
        made = traced(captured.module, inputs, outputs, flat.spec, spec)
        return replace(made, replicated_calls=tuple(replicated_calls(captured.module, varying)))

    def sharded(again: frozenset[str]) -> Trace:
        one = for_one_rank(name, captured.module, whole, outputs, sources, may_differ, again, group.sizes)
        return replace(traced(one.module, inputs, one.outputs, flat.spec, spec), links=one.links)

    made = choose(sharded)
    of_whole = with_containers(out_spec, _around(flat, sources, "part"))
    replicated = traced(captured.module, whole, outputs, bare_spec(flat.spec, "part"), of_whole)
    return replace(made, replicated_calls=tuple(replicated_calls(captured.module, varying)), whole=replicated)


def _returned(
    name: str,
    captured: _Captured,
    inputs: Sequence[Input],
    varying: Mapping[fx.Node, Cause],
    flat: Flat,
    roles: Roles,
    check_replication: bool,
) -> tuple[list[Output], list[int | None]]:
    """What a step returns, and for each output the input in whose container it comes out, if there is one."""
    graph, spec = captured.module.graph, captured.out_spec
    outputs, causes = _outputs(graph, captured.leaves, spec, varying)
    outputs = assign_slots(outputs, spec, inputs, flat, roles)
    outputs, sources = assign_containers(outputs, spec, inputs, flat, roles)
    if check_replication:
        only_batches = roles.batch | roles.static == set(range(len(roles.names)))
        state = [item.name for item in inputs if item.replicated]
        arguments = _arguments_by_node(graph.find_nodes(op="placeholder"), inputs)
        check_outputs(name, outputs, causes, arguments, state, only_batches)
    return outputs, sources


def _around(flat: Flat, sources: Sequence[int | None], but: Role | None = None) -> list[pytree.Spec | None]:
    """What lies around each output, from the inputs in whose place they come out; but for containers of some role."""
    found = zip(places_in(flat.spec), flat.leaves, strict=True)
    places = [place for place, leaf in found if isinstance(leaf, torch.Tensor)]
    of_outputs = [LeafPlace() if source is None else places[source] for source in sources]
    return [None if place.container.role == but else place.around for place in of_outputs]


def _arguments_by_node(placeholders: Sequence[fx.Node], inputs: Sequence[Input]) -> dict[str, str]:
    """The name of each argument in messages, by the name of its node."""
    return {
        node.name: f"{'batch' if item.role == 'batch' else item.container.adjective} argument {item.name}".lstrip()
        for node, item in zip(placeholders, inputs, strict=True)
    }


@dataclass(frozen=True)
class _Captured:
    """A step as a graph.

    Attributes:
        module: the graph.
        leaves: what the step returned.
        out_spec: how that makes up its result.
        closure: the tensors that the step closes over: by `id`, their names.
    """

    module: fx.GraphModule
    leaves: list[Any]
    out_spec: Any
    closure: Mapping[int, str]


def _captured(
    name: str,
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    group: Group,
    wire: Wire | None,
    inputs: Sequence[Input],
) -> _Captured:
    """The graph of a step that has passed all checks."""
    returned: list[Any] = []
    examples = examples_of(inputs, flat)

    def flat_step(*values: torch.Tensor) -> list[torch.Tensor]:
        with labelled_state((i.name, x) for i, x in zip(inputs, values, strict=True) if i.role == "per rank"):
            leaves, spec = pytree.flatten(call_with(step, flat, roles, values))
        refuse_foreign_outputs(name, leaves, spec)
        returned[:] = list(map(plain, leaves)), spec
        return [leaf for leaf in returned[0] if isinstance(leaf, torch.Tensor)]

    refuse_held(name, closed_over_tensors(step).values())
    try:
        with untouched(step) as changes:
            module = capture(
                name, flat_step, examples, group, wire, [i.name for i in inputs], lambda: closed_over_tensors(step)
            )
    except FdpError:
        raise
    except Exception as error:
        # The tracer's fault, or the step's own? Its author wants to see his own mistakes as they are.
        if runs_untraced(step, flat, roles, group):
            raise untraceable(name, error) from error
        raise
    closure = closed_over_names(step)
    _finish_and_check(name, module, inputs, closure, changes)
    check_closure_memory(name, module, inputs, flat.tensors, closure)
    leaves, out_spec = returned
    return _Captured(module, leaves, out_spec, closure)


def _operations(graph: fx.Graph) -> tuple[list[Operation], list[Reduction]]:
    """The operations of a graph in order, and its reductions."""
    operations, markers, produced = operations_of(graph)
    reductions = _reductions(operations, markers, produced)
    for index, reduction in enumerate(reductions):
        operations[reduction.operation] = replace(operations[reduction.operation], reduction=index)
    return operations, reductions


def _finish_and_check(
    name: str, graph_module: fx.GraphModule, inputs: Sequence[Input], closure: Mapping[int, str], changes: Sequence[str]
) -> None:
    """Bring a graph into its final form, and refuse what a step must not do."""
    graph = graph_module.graph
    check_views(name, graph)
    check_shapes(name, graph)
    reshape_by_views(name, graph_module, inputs, closure)
    take_lists_apart(graph)
    cast_early(graph)
    check_views(name, graph)
    check_places(name, graph, inputs)
    check_gaps(name, graph, inputs)
    check_made_here(name, graph_module, closure)
    check_closure(name, graph_module, closure)
    check_untouched(name, changes)
    check_writes(name, graph_module, inputs, closure)
    check_initialised(name, graph)
    check_devices(name, graph)
    check_branches(name, graph)
    check_recomputation(name, graph)


def _definition(step: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(step), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else "unknown source"


def _constants(names: Sequence[str], flat: Flat, roles: Roles) -> list[tuple[str, str]]:
    plain = [
        (name, comparable(leaf))
        for name, leaf in zip(names, flat.leaves, strict=True)
        if not isinstance(leaf, torch.Tensor)
    ]
    fixed = zip(sorted(roles.static), flat.static, strict=True)
    return plain + [(roles.names[position], comparable(value)) for position, value in fixed]


def _reductions(
    operations: Sequence[Operation], markers: dict[fx.Node, int], produced: dict[fx.Node, int]
) -> list[Reduction]:
    found = []
    for node, operation in markers.items():
        if (collective := collective_of(node)) is None:
            continue
        given = {argument.name: value for argument, value in bound_arguments(node)}
        value = given["x"].meta["val"]
        position = maker = produced[node]
        dtype = value.dtype
        if "wire" in given:
            dtype = given["wire"]
            maker = _before_cast(operations, position) if is_wire_cast(node) else position
        found.append(
            Reduction(
                name=given["label"],
                kind=given.get("kind", "value"),
                op=collective.name,
                root=given.get("root", 0),
                shape=tuple(value.shape),
                dtype=dtype,
                device=value.device,
                size_bytes=value.numel() * dtype.itemsize,
                produced_by=operations[maker].target if maker >= 0 else "an input",
                position=position,
                operation=operation,
                source=operations[maker].source if maker >= 0 else "",
                accumulate_dtype=given.get("accumulate"),
                pairs=tuple(zip(given["pairs"][::2], given["pairs"][1::2], strict=True)) if collective.paired else (),
                along=dimension_of(given["axis"]),
            )
        )
    return sorted(found, key=lambda reduction: (reduction.position, reduction.operation))


def _before_cast(operations: Sequence[Operation], position: int) -> int:
    """The operation behind the cast to the wire dtype: readers of a trace look for that one."""
    position = max(operations[position].needs, default=-1)
    while position >= 0 and operations[position].view:
        position = max(operations[position].needs, default=-1)
    return position


def _outputs(
    graph: fx.Graph, leaves: Sequence[Any], spec: pytree.Spec, varying: Mapping[fx.Node, Cause]
) -> tuple[list[Output], dict[str, Cause]]:
    names = pytree.names_in(spec, "output")
    made = iter(graph.output_node().args[0])  # type: ignore[arg-type]
    outputs, causes = [], {}
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            outputs.append(Output(name, None, None, None, False, False, leaf))
            continue
        node: Any = next(made)
        if node in varying:
            causes[name] = varying[node]
        outputs.append(
            Output(
                name=name,
                node=node.name,
                shape=tuple(leaf.shape),
                dtype=leaf.dtype,
                varying=node in varying,
                per_rank=_is_declared(node),
            )
        )
    return outputs, causes


def _is_declared(node: fx.Node) -> bool:
    return is_marker(node, "vary") and node.args[1] == "per_rank"
