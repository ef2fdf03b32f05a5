"""Write the program of a plan with the compiler: one graph for the whole step, messages and updates included."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fdp.distributed.exchange import all_say
from fdp.distributed.group import Group
from fdp.emit.codegen.loops import compiled_loop
from fdp.emit.codegen.program import Program
from fdp.emit.compiled.barriers import IMPLEMENTED, running
from fdp.emit.compiled.drawing import as_it_is
from fdp.emit.compiled.draws import functions_that_draw, generators_of, operands_of
from fdp.emit.compiled.graph import functional_graph, result_name
from fdp.emit.compiled.inductor import OWN_DECOMPOSITIONS, Lowered, Unusable, decompositions, lower
from fdp.emit.compiled.options import Options
from fdp.emit.compiled.passes import declare
from fdp.emit.compiled.public import asks_for_public, compile_publicly, warn_of_public
from fdp.emit.compiled.recording import Recording
from fdp.emit.compiled.unaliased import Apart
from fdp.emit.memory.layout import Layout
from fdp.emit.memory.memory_plan import COMPILER, MemoryPlan
from fdp.emit.memory.passes import plan_memory
from fdp.emit.memory.planning import Place, slot_name
from fdp.emit.proved import verified_program
from fdp.errors import CompileError, build_message
from fdp.plan import Plan
from fdp.trace.effects import effects_of, is_marker
from fdp.verify import VerificationError
from fdp.verify.implementations import verify_implementations, verify_loops
from fdp.verify.lowered import Returned, verify_lowered


@dataclass(frozen=True)
class Buckets:
    """The buckets of a compiled program: where members lie, and which hold values divided by the number of ranks."""

    places: Mapping[str, Place]
    layouts: Mapping[torch.device, Layout]
    scaled: frozenset[int]


def compile_program(plan: Plan, group: Group, communicates: bool, options: Options, records: bool) -> Program:
    """Compile the program of a plan.

    Args:
        plan: the plan.
        group: the ranks that it is for.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        options: how.
        records: whether it may become one CUDA graph.

    Returns:
        The program.

    Raises:
        CompileError: the compiler cannot take an operator.
    """
    trace, memory = plan.trace, plan_memory(plan, communicates, COMPILER)
    constants, held = _constants(trace.graph, group.rank)
    buckets = _buckets(memory)
    alike, generators = options.draws_alike, generators_of(trace.graph)
    apart = functions_that_draw(trace.graph) if alike else []

    def functional(decomposed: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
        return functional_graph(memory, constants, buckets.places, decomposed, apart if alike else None)

    bodies = {
        loop.node: compile_program(body, group, False, options, records=False)
        for loop, body in zip(trace.loops, plan.bodies, strict=True)
    }
    own_messages = None
    returned = _returned(memory)

    def prove(lowered: fx.GraphModule, decomposed: Mapping[Any, Callable[..., Any]]) -> None:
        _prove_own_operators()
        verify_loops(trace, lambda body, found: compiled_loop(body, found.count, trace.nodes[found.node]))
        own = generators if alike else None
        verify_lowered(plan, lowered, held, buckets, returned, group.rank, communicates, decomposed, own)

    try:
        lowered = None if asks_for_public() else _lower(trace.name, functional, options, prove)
    except VerificationError as error:
        warnings.warn(
            f"fdp: the graph to compile of step {trace.name!r} was found to be wrong before it ran. The step runs "
            "operator by operator in its place. Please report this to the authors of fdp: "
            + "; ".join(line.strip() for line in str(error).splitlines()[:-1]),
            stacklevel=2,
        )
        return verified_program(plan, group.rank, communicates)
    if lowered is None and (bodies or apart):
        what = "fdp.accumulate" if bodies else f"{apart[0].target} around what draws random numbers"
        raise CompileError(
            build_message(
                f"step {trace.name!r} cannot be compiled: the public entry of inductor does not take {what}.",
                remedy="compile=False runs it operator by operator.",
            )
        )
    if lowered is None:
        # Taken apart by inductor itself: how it wants that is private, too.
        lowered, own_messages = compile_publicly(
            functional(OWN_DECOMPOSITIONS), plan, group, list(buckets.places), options
        )
        buckets = replace(buckets, places={}, layouts={})
    source = _wrapper(returned, len(held), list(buckets.places))
    function, recording = lowered.function, None
    if records:
        donated = frozenset(index for index, item in enumerate(trace.inputs) if item.donated)
        # What draws random numbers draws others the second time; what sends messages would send them twice.
        compares = not memory.markers and not any(effects_of(node).random for node in trace.nodes.values())
        recording = function = Recording(
            trace.name, function, len(trace.inputs), donated, compares, lambda yes: all_say(group, yes)
        )
    # Inputs that are not donated, and closed-over tensors, are the caller's: only the former may be returned.
    free = frozenset(at for at, item in enumerate(trace.inputs) if not item.donated)
    function = Apart(function, _strides(memory, returned), free, alone=len(free) < len(trace.inputs))
    namespace: dict[str, Any] = {"compiled": function, "constants": held, "running": running}
    by_number = [compiled_loop(bodies[loop.node], loop.count, trace.nodes[loop.node]) for loop in trace.loops]
    namespace["loops"] = [*by_number, *(as_it_is(node, operands_of(node)) for node in apart)]
    namespace["generators"] = generators
    exec(compile(source, f"<fdp step {trace.name}>", "exec"), namespace)
    text = "\n\n".join([source, lowered.source, *(body.source for body in bodies.values())])
    places, layouts, scaled = buckets.places, buckets.layouts, buckets.scaled
    return Program(text, namespace["step"], places, layouts, scaled, recording, own_messages, loops=bodies)


@functools.cache
def _prove_own_operators() -> None:
    """Prove, once in a process, that fdp's own operators do what the proof of graphs takes them for."""
    verify_implementations(IMPLEMENTED, running)


def _lower(
    name: str, functional: Callable[..., fx.GraphModule], options: Options, prove: Callable[..., None]
) -> Lowered | None:
    """Compile by the private entry, which keeps the plan; None if this torch has none that fdp knows."""
    try:
        decomposed = decompositions(dict(options.settings))
        graph = functional(decomposed)
        declare(graph.graph, options.multiplies)
        graph.recompile()
        prove(graph, decomposed)
        return lower(name, graph, dict(options.settings))
    except Unusable as error:
        warn_of_public(str(error))
        return None


def _constants(graph: fx.GraphModule, rank: int) -> tuple[list[fx.Node], list[torch.Tensor]]:
    """Values that are the same at every call: closed-over tensors, and the rank.

    They are inputs of what is compiled: compiled code is kept on disk, and shared by ranks.
    """
    nodes, values = [], []
    for node in graph.graph.nodes:
        held = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor):
            nodes.append(node)
            values.append(held)
        elif is_marker(node, "axis_index"):
            nodes.append(node)
            values.append(torch.tensor(rank, dtype=torch.int64, device=node.meta["val"].device))
    return nodes, values


def _buckets(memory: MemoryPlan) -> Buckets:
    """The buckets of a compiled step: what comes back is a name of its own, where the memory plan has it."""
    named, places = memory.places.named, dict[str, Place]()
    for index, members in memory.markers.items():
        for at, marker in enumerate(members):
            places[slot_name(index, at)] = named[slot_name(index, at)]
            places[result_name(memory.plan, index, at)] = named[marker.name]
    return Buckets(places, memory.layouts, frozenset(memory.places.scaled))


def _returned(memory: MemoryPlan) -> list[Returned]:
    """Where each result of a step is: a donated input goes back to the caller as the object that it is."""
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
    """How each result lies that is made by what is compiled."""
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
