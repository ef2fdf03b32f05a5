"""Write the program of a plan with the compiler: one graph for the whole step, messages and updates included."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.distributed.exchange import all_say
from fdp.distributed.group import Group
from fdp.emit.codegen.loop_bodies import compiled_loop
from fdp.emit.codegen.program import Program
from fdp.emit.compiled.barriers import IMPLEMENTED, running
from fdp.emit.compiled.drawing import run_uncompiled
from fdp.emit.compiled.draws import functions_that_draw, generators_of, operands_of
from fdp.emit.compiled.graph import functional_graph, received_name
from fdp.emit.compiled.inductor import Lowered, decompositions, lower, traced_under
from fdp.emit.compiled.options import Options
from fdp.emit.compiled.passes import declare
from fdp.emit.compiled.recording import Recording
from fdp.emit.compiled.unaliased import UnaliasedResults
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.layout import Layout
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.planning import Place, slot_name
from fdp.emit.proved import verified_program
from fdp.plan import Plan
from fdp.trace import Trace
from fdp.trace.operators.effects import effects_of, is_marker, mesh_dimension_of
from fdp.verify import VerificationError
from fdp.verify.implementations import verify_implementations, verify_loops
from fdp.verify.lowered import Returned, verify_lowered


@dataclass(frozen=True)
class Buckets:
    """The buckets of a compiled program: where members are, and which hold values divided by the number of ranks.

    What is gathered arrives in its bucket.
    """

    places: Mapping[str, Place]
    layouts: Mapping[torch.device, Layout]
    scaled: frozenset[int]
    gathered: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Job:
    """A plan to compile, with all that was decided before.

    Attributes:
        memory: the memory plan.
        group: the ranks.
        communicates: False in a world of one.
        options: how.
        constants: nodes whose values are the same at every call.
        held: those values.
        buckets: places in buckets.
        returned: where each result is.
        bodies: the programs of the bodies of loops, by node.
        generators: that the step draws from.
        apart: functions of functions that draw, and run as they are.
    """

    memory: MemoryPlan
    group: Group
    communicates: bool
    options: Options
    constants: Sequence[fx.Node]
    held: Sequence[torch.Tensor]
    buckets: Buckets
    returned: Sequence[Returned]
    bodies: Mapping[str, Program]
    generators: Sequence[torch.Generator]
    apart: Sequence[fx.Node]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.memory.plan


def compile_program(memory: MemoryPlan, group: Group, communicates: bool, options: Options, records: bool) -> Program:
    """Compile the program of a plan: memory plan -> graph -> proof -> lowering -> program.

    Args:
        memory: what was decided of the plan.
        group: the ranks that it is for.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        options: how.
        records: whether it may become one CUDA graph.

    Returns:
        The program.

    Raises:
        CompileError: the compiler cannot take an operator.
    """
    plan = memory.plan
    bodies = {loop: compile_program(body, group, False, options, False) for loop, body in memory.bodies.items()}
    constants, held = _constants(plan.trace, group.rank)
    apart = functions_that_draw(plan.trace.graph) if options.draws_alike else []
    job = _Job(
        memory, group, communicates, options, constants, held, _buckets(memory), _returned(memory), bodies,
        generators_of(plan.trace.graph), apart,
    )  # fmt: skip
    try:
        graph = _proved_graph(job)
    except VerificationError as error:
        warnings.warn(
            f"fdp: the graph to compile of step {plan.trace.name!r} was found to be wrong before it ran. The step runs "
            "operator by operator in its place. Please report this to the authors of fdp: "
            + "; ".join(line.strip() for line in str(error).splitlines()[:-1]),
            stacklevel=2,
        )
        return verified_program(plan_memory(plan, communicates), group.rank, communicates)
    return _program(job, lower(plan.trace.name, graph, dict(options.settings)), records)


def _proved_graph(job: _Job) -> fx.GraphModule:
    """The graph that the compiler gets: made from the plan, effects declared, and proved."""
    plan, options = job.plan, job.options
    settings = dict(options.settings)
    decomposed = decompositions(settings)
    alike = options.draws_alike
    with traced_under(settings):
        graph = functional_graph(
            job.memory, job.constants, job.buckets.places, decomposed, job.apart if alike else None
        )
    declare(graph.graph, options.multiplies)
    graph.recompile()
    _prove_own_operators()
    verify_loops(plan.trace, lambda body, found: compiled_loop(body, found.count, plan.trace.nodes[found.node]))
    generators = job.generators if alike else None
    rank = job.group.rank
    verify_lowered(plan, graph, job.held, job.buckets, job.returned, rank, job.communicates, decomposed, generators)
    return graph


def _program(job: _Job, lowered: Lowered, records: bool) -> Program:
    """The function that calls what was compiled, with all that it needs at every call."""
    trace, buckets = job.plan.trace, job.buckets
    source = _wrapper(job.returned, len(job.held), list(buckets.places))
    function, recording = lowered.function, None
    # Inputs that are not donated, and closed-over tensors, are the caller's: only the former may be returned.
    donated = frozenset(at for at, item in enumerate(trace.inputs) if item.donated)
    free = frozenset(range(len(trace.inputs))) - donated
    if records:
        # What draws random numbers draws others the second time; what sends messages would send them twice.
        compares = not job.memory.markers and not any(effects_of(node).random for node in trace.nodes.values())
        recording = function = Recording(
            trace.name, function, len(trace.inputs), donated, compares, lambda yes: all_say(job.group, yes)
        )
    by_number = [compiled_loop(job.bodies[loop.node], loop.count, trace.nodes[loop.node]) for loop in trace.loops]
    namespace: dict[str, Any] = {
        "compiled": UnaliasedResults(function, _strides(job.memory, job.returned), free, alone=bool(donated)),
        "constants": job.held,
        "running": running,
        "loops": [*by_number, *(run_uncompiled(node, operands_of(node)) for node in job.apart)],
        "generators": job.generators,
    }
    exec(compile(source, f"<fdp step {trace.name}>", "exec"), namespace)
    text = "\n\n".join([source, lowered.source, *(body.source for body in job.bodies.values())])
    return Program(
        text, namespace["step"], buckets.places, buckets.layouts, buckets.scaled, recording, loops=job.bodies
    )


@functools.cache
def _prove_own_operators() -> None:
    """Prove, once in a process, that fdp's own operators compute what the proof of graphs assumes."""
    verify_implementations(IMPLEMENTED, running)


def _constants(trace: Trace, rank: int) -> tuple[list[fx.Node], list[torch.Tensor]]:
    """Values that are the same at every call: closed-over tensors, and the rank.

    They are inputs of what is compiled: compiled code is kept on disk, and shared by ranks.
    """
    nodes, values = [], []
    for node in trace.graph.graph.nodes:
        held = getattr(trace.graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor):
            nodes.append(node)
            values.append(held)
        elif is_marker(node, "axis_index"):
            nodes.append(node)
            place = trace.place_along(rank, mesh_dimension_of(node))
            values.append(torch.tensor(place, dtype=torch.int64, device=node.meta["val"].device))
    return nodes, values


def _buckets(memory: MemoryPlan) -> Buckets:
    """The buckets of a compiled step; a received value has a name of its own if the memory plan gives it one."""
    named, places = memory.places.named, dict[str, Place]()
    for index, members in memory.markers.items():
        for at, marker in enumerate(members):
            places[slot_name(index, at)] = named[slot_name(index, at)]
            places[received_name(index, at)] = named[marker.name]
    return Buckets(places, memory.layouts, memory.places.scaled)


def _returned(memory: MemoryPlan) -> list[Returned]:
    """Where each result of a step comes from; a donated input is returned as the caller's own object."""
    graph, placement = memory.plan.trace.graph.graph, memory.placement
    position = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: list[Returned] = []
    made = 0
    for index, node in enumerate(placement.returned):
        if node in position and index not in placement.cloned:
            found.append(("given", position[node]))
        else:
            found.append(("made", made))
            made += 1
    return found


def _strides(memory: MemoryPlan, returned: Sequence[Returned]) -> list[tuple[int, ...]]:
    """The strides of each result that the compiled function makes."""
    results = zip(memory.placement.returned, returned, strict=True)
    return [tuple(node.meta["val"].stride()) for node, (where, _) in results if where == "made"]


def _wrapper(returned: Sequence[Returned], constants: int, slots: Sequence[str]) -> str:
    """The text of the function that calls what was compiled: it adds slots, and gives donated inputs back."""
    kept = [number for where, number in returned if where == "given"]
    given = iter(range(len(kept)))
    outputs = [f"given[{next(given)}]" if where == "given" else f"made[{number}]" for where, number in returned]
    lines = ["def step(inputs, start, wait):"]
    if kept:
        lines.append(f"    given = [inputs[index] for index in {kept}]")
    if constants:
        # Anew at each call: one whose `.data` has been set lies elsewhere by now.
        lines.append("    inputs += [held.detach() for held in constants]")
    if slots:
        lines.append(f"    inputs += [{', '.join(slots)}]")
    lines += ["    with running(start, wait, loops, generators):", "        made = compiled(inputs)"]
    lines.append(f"    return [{', '.join(outputs)}]")
    return "\n".join(lines) + "\n"
