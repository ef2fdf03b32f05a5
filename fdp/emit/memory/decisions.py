"""`Plan` -> `MemoryPlan`: what is decided about memory, one thing after the other."""

from __future__ import annotations

from dataclasses import replace

from fdp.emit.memory.allocation import allocate
from fdp.emit.memory.deferred_products import find_added
from fdp.emit.memory.donation import place_outputs
from fdp.emit.memory.instructions import instructions_of
from fdp.emit.memory.liveness import Accesses, unused_nodes
from fdp.emit.memory.memory_plan import ALL, MemoryPlan, Savings
from fdp.emit.memory.planning import find_places
from fdp.emit.memory.views import redundant_views
from fdp.plan import Plan


def plan_memory(plan: Plan, communicates: bool, savings: Savings = ALL) -> MemoryPlan:
    """Decide on everything that concerns memory.

    Args:
        plan: the plan.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        savings: what the backend makes use of.

    Returns:
        The decisions; a function of the arguments alone.
    """
    trace, graph = plan.trace, plan.trace.graph.graph
    same = redundant_views(graph) if savings.views else {}
    accesses = Accesses(plan)
    added = find_added(graph, same, accesses) if savings.products else {}  # first: all others see the reads as they are
    placement = place_outputs(plan, same, accesses, plain=not savings.donation, gathers=savings.results)
    markers = {
        bucket.index: tuple(map(trace.marker, bucket.members))
        for bucket in plan.buckets
        if communicates or not bucket.collective.in_place
    }
    sent = {marker for members in markers.values() for marker in members}
    alone = frozenset(map(trace.marker, range(len(trace.reductions)))) - sent
    places = find_places(plan, same, placement, accesses, markers, alone, savings.views, savings.results)
    unused = unused_nodes(graph, places.constants) if savings.results else frozenset()
    listed = instructions_of(plan, placement, accesses, places, markers, alone, savings.pack_from_bytes)
    bodies = {loop.node: plan_memory(body, False, savings) for loop, body in zip(trace.loops, plan.bodies, strict=True)}
    memory = MemoryPlan(plan, savings, same, added, unused, placement, markers, alone, places, listed, bodies)
    return replace(memory, layouts=allocate(memory))
