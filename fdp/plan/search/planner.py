"""Choose buckets by cost: the best cuts of the search, compared with every fixed cap in the same simulation.

References: Shi, Chu and Li, MG-WFBP (INFOCOM 2019); Li et al., PyTorch Distributed (VLDB 2020), section 6.2, which
recommends to sweep bucket sizes by hand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fdp.plan.buckets import (
    AUTO_CAP_MB,
    ReductionKind,
    arrange,
    gathered_sooner,
    kind_of,
    make_buckets,
    partition_by_caps,
    upstream_of,
)
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.forecast import Alternative, Forecast
from fdp.plan.cost.network import Network
from fdp.plan.cost.ticks import TICKS_PER_S, Ticks, ticks_of
from fdp.plan.schedule import order
from fdp.plan.search.chain import chain_of
from fdp.plan.search.optimum import best_cuts
from fdp.plan.simulate import outcome
from fdp.trace.trace import Trace

FIXED_CAPS_MB: tuple[tuple[float, ...], ...] = (AUTO_CAP_MB, (1.0,), (5.0,), (25.0,), (100.0,), (math.inf,))
"""Caps that "auto" is compared with, and never worse than: common choices, among them DDP's default."""

_MOST_KINDS = 4
"""The number of kinds of reductions whose cuts are searched: those with the most bytes."""

_NEARLY = 0.01
"""Ends that differ by less than this share are as good as equal: no step is measured more exactly."""

_LAGS = (1, 2, 4)
"""Numbers of other messages under way while a bucket is waited for whose result is gathered; each is tried."""

_EARLIEST = "auto, on this network alone"

Groups = list[tuple[int, ...]]


def consider(
    trace: Trace, caps_mb: Sequence[float], costs: Costs, network: Network, world_size: int
) -> tuple[Groups, Forecast]:
    """Make the buckets of given caps, and predict what they take.

    Args:
        trace: of the step.
        caps_mb: of the first bucket, the next, ..., in MiB.
        costs: of its operations.
        network: between its ranks.
        world_size: their number.

    Returns:
        The members of each bucket, and the forecast.

    Raises:
        ArgumentError: the costs are those of another trace, or there is no such number of ranks.
    """
    judge = _Judge(trace, ticks_of(trace, costs, network, world_size))
    groups = _with_best_gathers(judge, partition_by_caps(trace.reductions, trace.operations, caps_mb))
    chosen = _alternative(_caps_name(caps_mb), groups, *judge.end_of(groups))
    return groups, Forecast(network, world_size, costs, chosen)


def choose_buckets(
    trace: Trace, costs: Costs, network: Network, world_size: int, spread: float = 0.0
) -> tuple[Groups, Forecast]:
    """Find the buckets with which the simulated step ends earliest.

    Buckets that end at nearly the same time may differ in what becomes of them on a network that is a little faster or
    slower: a large bucket that is full just when the link is free leaves it idle if the link is free sooner. So where
    a `spread` is given, those are taken whose ends, on the network, a faster and a slower one, come earliest on
    average; among those that the searches on the three have found and the fixed caps, as far as they end no later than
    every fixed cap and at most a hundredth later than the best.

    Where all reductions are of one kind (operation, dtype and device) and none is computed from another's result, the
    search is exact: `Forecast.optimal` says that no other buckets of neighbours end earlier. Of several kinds the
    largest is cut first, with the others as the best fixed caps have them, and then the others in turn. Where a
    reduction is computed from another's result, cuts are chosen as if nothing waited for that other one. Where messages
    slow computing down, a beam takes the place of the full search. A gradient that is read only together with a later
    one is taken to be waited for too early. In each case the result is simulated in full, and is taken only if it ends
    before every fixed cap does.

    Args:
        trace: of the step.
        costs: of its operations.
        network: between its ranks.
        world_size: their number.
        spread: by what share messages may turn out faster or slower than on that network; 0 for not at all.

    Returns:
        The members of each bucket, and the forecast: a function of the arguments alone.

    Raises:
        ArgumentError: the costs are those of another trace, or there is no such number of ranks.
    """
    judge = _Judge(trace, ticks_of(trace, costs, network, world_size))
    by_caps = {
        _caps_name(caps): _with_best_gathers(judge, partition_by_caps(trace.reductions, trace.operations, caps))
        for caps in FIXED_CAPS_MB
    }
    fixed = list(by_caps.values())
    best, proven = _earliest(judge, fixed)
    chosen = _most_robust(judge, best, fixed, costs, network, world_size, spread) if spread else best
    others = dict(by_caps) if chosen == best else {_EARLIEST: best, **by_caps}
    return chosen, Forecast(
        network,
        world_size,
        costs,
        _alternative("auto", chosen, *judge.end_of(chosen)),
        tuple(_alternative(name, groups, *judge.end_of(groups)) for name, groups in others.items()),
        (proven or judge.ticks.silent) and judge.end_of(chosen)[0] == judge.end_of(best)[0],
    )


class _Judge:
    """Simulates buckets in full, each once.

    Args:
        trace: of the step.
        ticks: what everything takes.
    """

    def __init__(self, trace: Trace, ticks: Ticks) -> None:
        self.trace, self.ticks = trace, ticks
        self.upstream = upstream_of(trace.reductions, trace.operations)
        self._known: dict[Any, tuple[float, float]] = {}

    def end_of(self, groups: Groups) -> tuple[float, float]:
        """When the step ends, and how much of that time the compute lane waits, in nanoseconds."""
        key = tuple(groups)
        if key not in self._known:
            self._known[key] = _outcome(self.trace, groups, self.ticks)
        return self._known[key]


def _earliest(judge: _Judge, start: Sequence[Groups]) -> tuple[Groups, bool]:
    """The buckets with the earliest end that the search finds from given ones, and whether that is proven."""
    trace, ticks = judge.trace, judge.ticks
    best, proven = min(start, key=judge.end_of), False
    kinds = _kinds(trace, judge.upstream)
    for members in kinds[:_MOST_KINDS] if not ticks.silent else ():
        others = [group for group in best if group[0] not in members]
        chain = chain_of(trace, sorted(members), others, ticks)
        cuts = best_cuts(chain, ticks, judge.end_of(best)[0] if chain.exact else math.inf)
        proven = chain.exact and cuts.proven and len(kinds) == 1
        own = [tuple(chain.members[a:b]) for a, b in zip((0, *cuts.ends), cuts.ends, strict=False)]
        groups = arrange([*others, *own], judge.upstream)
        if own and len(groups) == len(others) + len(own):
            best = min(best, _with_best_gathers(judge, groups), key=judge.end_of)
    return best, proven


def _with_best_gathers(judge: _Judge, groups: Groups) -> Groups:
    """The same buckets, with gathers of results of other buckets started such that the step ends earliest."""
    orders = [gathered_sooner(groups, judge.trace.reductions, judge.upstream, lag) for lag in _LAGS]
    return min((groups, *orders), key=judge.end_of)


def _most_robust(
    judge: _Judge,
    best: Groups,
    by_caps: Sequence[Groups],
    costs: Costs,
    network: Network,
    world_size: int,
    spread: float,
) -> Groups:
    """Among buckets with nearly the earliest end, those that end earliest on average on slower and faster networks."""
    judges = [judge]
    for factor in (1 + spread, 1 / (1 + spread)):
        other = replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * factor)
        judges.append(_Judge(judge.trace, ticks_of(judge.trace, costs, other, world_size)))
    found = [best, *by_caps, *(_earliest(other, [best, *by_caps])[0] for other in judges[1:])]
    latest = min(judge.end_of(best)[0] * (1 + _NEARLY), *(judge.end_of(groups)[0] for groups in by_caps))
    good = [groups for groups in found if judge.end_of(groups)[0] <= latest]
    return min(good, key=lambda groups: (sum(each.end_of(groups)[0] for each in judges), judge.end_of(groups)))


def _kinds(trace: Trace, upstream: Sequence[int]) -> list[set[int]]:
    """Reductions that may share buckets, those with the most bytes first."""
    found: defaultdict[ReductionKind, set[int]] = defaultdict(set)
    for index, reduction in enumerate(trace.reductions):
        if reduction.numel:
            found[kind_of(trace.reductions, upstream, index)].add(index)
    sizes = {kind: sum(trace.reductions[member].size_bytes for member in found[kind]) for kind in found}
    return [found[kind] for kind in sorted(found, key=lambda kind: -sizes[kind])]


def _outcome(trace: Trace, groups: Groups, ticks: Ticks) -> tuple[float, float]:
    buckets = make_buckets(trace.reductions, groups, trace.dimensions)
    return outcome(buckets, order(trace.operations, trace.reductions, buckets), ticks)


def _alternative(name: str, groups: Groups, end: float, exposed: float) -> Alternative:
    return Alternative(name, len(groups), end / TICKS_PER_S, exposed / TICKS_PER_S)


def _caps_name(caps_mb: Sequence[float]) -> str:
    return ", ".join(f"{cap:g}" for cap in caps_mb)
