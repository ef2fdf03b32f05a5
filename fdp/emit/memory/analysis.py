"""Facts about a plan that memory planning needs: aliases, liveness, and what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from fdp.emit.memory.deferred_products import find_added
from fdp.emit.memory.liveness import Liveness
from fdp.emit.memory.savings import Savings
from fdp.emit.memory.views import redundant_views
from fdp.plan import Plan
from fdp.trace.operators.effects import storages_of


@dataclass(frozen=True)
class Analysis:
    """The facts that all decisions about memory use.

    Attributes:
        plan: the plan.
        savings: what the backend makes use of.
        same: views that are their own base.
        added: for each addition in place that computes the product which it adds, that product.
        accesses: what the plan does to memory, and when; a product is read where it is added.
        markers: for each bucket that is sent, the markers of its members.
        alone: markers that send nothing.
    """

    plan: Plan
    savings: Savings
    same: Mapping[fx.Node, fx.Node]
    added: Mapping[fx.Node, fx.Node]
    accesses: Liveness
    markers: Mapping[int, tuple[fx.Node, ...]]
    alone: frozenset[fx.Node]


def analyse(plan: Plan, communicates: bool, savings: Savings) -> Analysis:
    """Collect the facts about a plan that decisions about its memory depend on.

    Args:
        plan: the plan.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        savings: what the backend makes use of.

    Returns:
        The facts; a function of the arguments alone.
    """
    trace, graph = plan.trace, plan.trace.graph.graph
    accesses = Liveness(plan)
    same = redundant_views(graph) if savings.views else {}
    if not savings.changed_views:
        same = {view: base for view, base in same.items() if accesses.writes.keys().isdisjoint(storages_of(view))}
    added = find_added(graph, same, accesses) if savings.products else {}  # first: all others see the reads as they are
    markers = {
        bucket.index: tuple(map(trace.marker, bucket.members))
        for bucket in plan.buckets
        if communicates or not bucket.collective.in_place
    }
    sent = {marker for members in markers.values() for marker in members}
    alone = frozenset(map(trace.marker, range(len(trace.reductions)))) - sent
    views, products = MappingProxyType(dict(same)), MappingProxyType(added)
    return Analysis(plan, savings, views, products, accesses, MappingProxyType(markers), alone)
