"""From a `Trace` to a `Plan`: pure analysis, without a process group and without a device."""

from __future__ import annotations

from collections.abc import Sequence

from fdp.errors import ArgumentError, build_message
from fdp.plan.buckets import Caps, make_buckets, partition_by_caps, resolve_caps
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.estimate import estimate
from fdp.plan.cost.forecast import Forecast
from fdp.plan.cost.network import Network, rank_count
from fdp.plan.plan import Plan
from fdp.plan.schedule import order
from fdp.plan.search.planner import choose_buckets, consider
from fdp.trace import Trace


def plan_trace(
    trace: Trace,
    bucket_cap_mb: Caps = "auto",
    costs: Costs | None = None,
    network: Network | None = None,
    world_size: int | None = None,
    spread: float = 0.0,
) -> Plan:
    """Decide which reductions share a message, and when everything happens.

    Args:
        trace: of a step.
        bucket_cap_mb: a number of MiB, a list of them (first bucket, next, ...), or "auto".
        costs: seconds of every operation; None for an estimate, where there is a network.
        network: between the ranks; without one, "auto" is a first bucket of 1 MiB, and 25 MiB for those that follow.
        world_size: number of ranks to plan for; None for as many as the step was traced for.
        spread: as for `choose_buckets`: by what share messages may turn out faster or slower than on that network.

    Returns:
        The plan: a function of the arguments alone, so that equal ranks make equal plans.

    Raises:
        ArgumentError: `bucket_cap_mb` has no meaning; the costs are those of another trace; or there are costs, or a
            world size, but no network.
    """
    caps = resolve_caps(bucket_cap_mb)
    if network is None:
        given = [
            f"{name}={value!r}"
            for name, value in (("costs", costs), ("world_size", world_size), ("spread", spread or None))
            if value is not None
        ]
        if given:
            raise ArgumentError(
                build_message(
                    f"step {trace.name!r} cannot be planned by cost without a network.",
                    [text if len(text) < 80 else f"{text[:80]}..." for text in given],
                    remedy="pass network=fdp.Network(latency_s=..., bandwidth_bytes_per_s=...) as well.",
                )
            )
        groups, forecast = partition_by_caps(trace.reductions, trace.operations, caps), None
    else:
        size = trace.world_size if world_size is None else rank_count(world_size)
        trace.refuse_other_ranks(size)
        costs = costs or estimate(trace)
        if isinstance(bucket_cap_mb, str):
            groups, forecast = choose_buckets(trace, costs, network, size, spread)
            caps = ()
        else:
            groups, forecast = consider(trace, caps, costs, network, size)
    return plan_groups(trace, groups, caps, forecast)


def plan_groups(
    trace: Trace, groups: Sequence[Sequence[int]], caps: tuple[float, ...] = (), forecast: Forecast | None = None
) -> Plan:
    """Plan a step with given buckets.

    Args:
        trace: of the step.
        groups: the members of each bucket, in the order in which they can start.
        caps: that they were made by; none if they were chosen by what they cost.
        forecast: what the plan rests on.

    Returns:
        The plan.
    """
    buckets = make_buckets(trace.reductions, groups, trace.dimensions)
    schedule = order(trace.operations, trace.reductions, buckets)
    bodies = tuple(plan_groups(loop.body, ()) for loop in trace.loops)
    return Plan(trace, buckets, schedule, caps, forecast, bodies)
