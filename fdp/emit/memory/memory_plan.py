"""`Plan` -> `MemoryPlan`: which values have a place, in which piece of memory, and what is copied when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fdp.emit.memory.donation import Placement, place_outputs
from fdp.emit.memory.instructions import Instruction, instructions_of
from fdp.emit.memory.liveness import Accesses
from fdp.emit.memory.planning import Places, find_places
from fdp.emit.memory.products import find_added
from fdp.emit.memory.views import redundant_views
from fdp.plan import Plan


@dataclass(frozen=True)
class Savings:
    """Which ways to save memory a backend makes use of.

    Attributes:
        views: views that change nothing, and reductions that send nothing, are the tensor that they are given.
        products: products that are only added to something are computed there.
        results: values have fixed places, which those that are not needed at the same time share.
        donation: new values are computed in the donated inputs; otherwise they are copied there, at the end.
        pack_from_bytes: members of at least so many bytes are packed as soon as they are computed.
    """

    views: bool
    products: bool
    results: bool
    donation: bool
    pack_from_bytes: float


ALL = Savings(True, True, True, True, pack_from_bytes=2**16)
"""For a program that runs operator by operator. The memory of smaller members matters less than a call for each."""

COMPILER = Savings(True, False, False, True, pack_from_bytes=0)
"""For a graph that a compiler gets, which finds places for its values itself."""

NONE = Savings(False, False, False, False, pack_from_bytes=math.inf)
"""For a program that does what the trace says, in the plainest way."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a plan does to memory, decided for one backend.

    Attributes:
        plan: the plan.
        savings: what the backend makes use of.
        same: views that are their own base.
        added: for each addition in place that computes the product which it adds, that product.
        placement: where outputs live.
        markers: for each bucket that is sent, the markers of its members.
        alone: markers that send nothing.
        places: values at fixed places.
        instructions: what the program does, each with the position in the schedule that it belongs to.
    """

    plan: Plan
    savings: Savings
    same: Mapping[fx.Node, fx.Node]
    added: Mapping[fx.Node, fx.Node]
    placement: Placement
    markers: Mapping[int, tuple[fx.Node, ...]]
    alone: frozenset[fx.Node]
    places: Places
    instructions: tuple[tuple[int, Instruction], ...]

    def value_of(self, node: fx.Node) -> fx.Node:
        """The node whose memory holds a value: its base, or the donated input that it is computed in."""
        node = self.same.get(node, node)
        node = self.placement.replaced.get(node, node)
        return self.placement.written.get(node, node)


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
    placement = place_outputs(plan, same, accesses, plain=not savings.donation)
    markers = {
        bucket.index: tuple(map(trace.marker, bucket.members))
        for bucket in plan.buckets
        if communicates or bucket.op == "all_gather"
    }
    sent = {marker for members in markers.values() for marker in members}
    alone = frozenset(map(trace.marker, range(len(trace.reductions)))) - sent
    places = find_places(plan, same, placement, accesses, markers, alone, savings.views, savings.results)
    listed = instructions_of(plan, placement, accesses, places, markers, alone, savings.pack_from_bytes)
    return MemoryPlan(plan, savings, same, added, placement, markers, alone, places, listed)
