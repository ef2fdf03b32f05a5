"""`Plan` -> `MemoryPlan`: what is decided about memory, one thing after the other."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from fdp.emit.memory.allocation import allocate
from fdp.emit.memory.analysis import analyse
from fdp.emit.memory.donation import place_outputs
from fdp.emit.memory.instructions import instructions_of
from fdp.emit.memory.liveness import unused_nodes
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.planning import find_places
from fdp.emit.memory.savings import ALL, Savings
from fdp.plan import Plan


def plan_memory(plan: Plan, communicates: bool, savings: Savings = ALL) -> MemoryPlan:
    """Make all decisions about the memory of a plan.

    Args:
        plan: the plan.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        savings: what the backend makes use of.

    Returns:
        The decisions; a function of the arguments alone.
    """
    trace = plan.trace
    analysis = analyse(plan, communicates, savings)
    placement = place_outputs(analysis)
    places = find_places(analysis, placement)
    unused = unused_nodes(trace.graph.graph, places.constants) if savings.results else frozenset()
    listed = instructions_of(analysis, placement, places)
    bodies = {loop.node: plan_memory(body, False, savings) for loop, body in zip(trace.loops, plan.bodies, strict=True)}
    memory = MemoryPlan(
        plan, savings, analysis.same, analysis.added, unused, placement, analysis.markers, analysis.alone, places,
        listed, MappingProxyType(bodies), layouts=MappingProxyType({}),
    )  # fmt: skip
    return replace(memory, layouts=MappingProxyType(allocate(memory)))
