"""Buckets by cost: against every way to cut, and against every fixed cap, with the simulator as the judge."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from drawn_traces import traces
from drawn_training import drawn_costs, drawn_network, training
from hypothesis import given
from hypothesis import strategies as st
from samples import examples

import fdp
from fdp.plan import Costs, Plan, Run, Start, Wait, plan_trace
from fdp.plan.buckets import make_buckets
from fdp.plan.cost.ticks import TICKS_PER_S, ticks_of
from fdp.plan.schedule import order
from fdp.plan.search.planner import FIXED_CAPS_MB
from fdp.plan.simulate import outcome
from fdp.trace import Trace

MIB = 2**20


def end_s(plan: Plan) -> float:
    assert plan.forecast is not None
    return plan.forecast.chosen.step_s


def earliest_s(trace: Trace, costs: Costs, network: fdp.Network, size: int) -> float:
    """The end of the best way to cut, by trying all of them; buckets of each dtype by themselves."""
    ticks = ticks_of(trace, costs, network, size)
    count, found = len(trace.reductions), math.inf
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(k for k, cut in enumerate(cuts, 1) if cut), count]
        buckets = make_buckets(trace.reductions, [tuple(range(a, b)) for a, b in itertools.pairwise(edges)])
        schedule = order(trace.operations, trace.reductions, buckets)
        found = min(found, outcome(buckets, schedule, ticks)[0])
    return found / TICKS_PER_S


def drawn_training(rng: random.Random, most: int, joint: bool, all_read: bool) -> Trace:
    count = rng.randint(1, most)
    sizes = [rng.choice([1, 16, 100, 1000, 5000, 20000]) for _ in range(count)]
    return training(sizes, [all_read or rng.random() < 0.8 for _ in range(count)], joint=joint)


@examples(150)
@given(st.integers(0, 2**32), st.booleans())
def test_no_way_to_cut_ends_earlier(seed: int, joint: bool) -> None:
    rng = random.Random(seed)
    trace = drawn_training(rng, 7, joint, all_read=rng.random() < 0.5)
    costs, network, size = drawn_costs(trace, rng), drawn_network(rng), rng.choice([2, 3, 16])
    plan = plan_trace(trace, "auto", costs, network, size)
    best = earliest_s(trace, costs, network, size)
    assert end_s(plan) == best
    # (Of gradients that are only read together it does not claim so.)
    assert plan.forecast is not None
    assert plan.forecast.optimal is not (joint and len(trace.reductions) > 1)
    assert plan.timeline().step_s == best


def test_of_several_kinds_nothing_is_proven() -> None:
    network = fdp.Network(1e-5, 1e8)
    for others, proven in (((), True), ((1, 3), False)):
        trace = training([5000] * 5, [True] * 5, others=others)
        plan = plan_trace(trace, "auto", Costs((1e-4,) * len(trace.operations), 1e-5, 0.0, "given"), network)
        assert plan.forecast is not None and plan.forecast.optimal is proven


@examples(60)
@given(st.integers(0, 2**32))
def test_no_way_to_cut_ends_earlier_where_messages_slow_computing(seed: int) -> None:
    rng = random.Random(seed)
    trace = drawn_training(rng, 6, False, all_read=True)
    costs, network = drawn_costs(trace, rng), drawn_network(rng, rng.choice([0.1, 0.3, 0.6]))
    plan = plan_trace(trace, "auto", costs, network)
    best = earliest_s(trace, costs, network, 2)
    assert plan.forecast is not None
    assert best <= end_s(plan) * (1 + 1e-12)
    if plan.forecast.optimal:
        assert end_s(plan) <= best * (1 + 1e-12)


def check_against_caps(trace: Trace, rng: random.Random, slowdown: float) -> None:
    costs, network = drawn_costs(trace, rng), drawn_network(rng, slowdown)
    size = rng.choice([1, 2, 8])
    plan = plan_trace(trace, "auto", costs, network, size)
    assert plan.forecast is not None
    for caps, other in zip(FIXED_CAPS_MB, plan.forecast.alternatives, strict=True):
        fixed = plan_trace(trace, list(caps), costs, network, size)
        assert fixed.timeline(network, size, costs).step_s == other.step_s == end_s(fixed)
        assert end_s(plan) <= other.step_s
    # What is predicted is what is simulated.
    timeline = plan.timeline()
    assert timeline.step_s == plan.forecast.chosen.step_s
    assert timeline.exposed_s == pytest.approx(plan.forecast.chosen.exposed_s, abs=1e-12)
    # Equal arguments, equal plans; and it is a plan: everything runs once, every bucket starts and is waited for.
    assert plan_trace(trace, "auto", costs, network, size) == plan
    runs = [index for item in plan.schedule if isinstance(item, Run) for index in item.operations]
    inside = {trace.reductions[m].operation for bucket in plan.buckets for m in bucket.members}
    assert sorted([*runs, *inside]) == list(range(len(trace.operations)))
    for kind in (Start, Wait):
        assert sorted(i.bucket for i in plan.schedule if isinstance(i, kind)) == list(range(len(plan.buckets)))


@examples(400, by_default=50)
@given(traces(), st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.4]))
def test_no_fixed_cap_ends_earlier_on_any_trace(trace: Trace, seed: int, slowdown: float) -> None:
    """Several kinds, reductions of reductions, all-gathers, broadcasts."""
    check_against_caps(trace, random.Random(seed), slowdown)


@examples(100, by_default=20)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.4]))
def test_no_fixed_cap_ends_earlier_in_training(seed: int, joint: bool, slowdown: float) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    sizes = [rng.choice([1, 1000, 100_000, 300_000, 1_000_000]) for _ in range(count)]
    others = tuple(k for k in range(count) if rng.random() < 0.3) if rng.random() < 0.3 else ()
    check_against_caps(training(sizes, [True] * count, joint=joint, others=others), rng, slowdown)


def mean_end_s(plan: Plan, network: fdp.Network, spread: float) -> float:
    """The average end of a plan on a network, a faster and a slower one."""
    bandwidths = [network.bandwidth_bytes_per_s * factor for factor in (1, 1 + spread, 1 / (1 + spread))]
    ends = [
        plan.timeline(dataclasses.replace(network, bandwidth_bytes_per_s=bandwidth)).step_s for bandwidth in bandwidths
    ]
    return sum(ends) / len(ends)


@examples(100)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1]), st.sampled_from([0.1, 0.5]))
def test_among_near_ties_those_are_taken_that_last_on_other_networks(seed: int, slowdown: float, spread: float) -> None:
    rng = random.Random(seed)
    trace = drawn_training(rng, 12, False, all_read=True)
    costs, network = drawn_costs(trace, rng), drawn_network(rng, slowdown)
    steady = plan_trace(trace, "auto", costs, network, spread=spread)
    sharp = plan_trace(trace, "auto", costs, network)
    fixed = [plan_trace(trace, list(caps), costs, network) for caps in FIXED_CAPS_MB]
    assert end_s(steady) <= min(end_s(sharp) * 1.01, *map(end_s, fixed)) * (1 + 1e-12)
    for other in (sharp, *fixed):
        if end_s(other) <= min(end_s(sharp) * 1.01, *map(end_s, fixed)):
            assert mean_end_s(steady, network, spread) <= mean_end_s(other, network, spread) * (1 + 1e-9)
    assert steady.forecast is not None and sharp.forecast is not None
    names = [other.name for other in steady.forecast.alternatives]
    if steady.buckets == sharp.buckets:
        assert steady.forecast == sharp.forecast
    else:
        assert names[0] == "auto, on this network alone"
        assert steady.forecast.alternatives[0].step_s == sharp.forecast.chosen.step_s
        assert not steady.forecast.optimal or end_s(steady) == end_s(sharp)


def test_a_message_that_only_just_hides_is_cut() -> None:
    trace = training([1000] * 3, [True] * 3)
    costs = Costs(tuple(1e-3 if o.backward else 1e-6 for o in trace.operations), 2e-6, 0.0, "given")
    # Two gradients together hide behind the last millisecond of the backward pass; on a slower link they would not.
    network = fdp.Network(latency_s=1e-6, bandwidth_bytes_per_s=4000 / 0.45e-3)
    sharp = plan_trace(trace, "auto", costs, network)
    steady = plan_trace(trace, "auto", costs, network, spread=1.0)
    assert (len(sharp.buckets), len(steady.buckets)) == (2, 3)
    assert sharp.forecast is not None and sharp.forecast.optimal
    assert steady.forecast is not None and not steady.forecast.optimal
    assert "\n  auto, on this network alone: 4.008 ms, 0.000 ms exposed, 2 buckets\n" in str(steady.forecast)


NETWORK = fdp.Network(1e-5, 1e8)


def test_a_plan_says_what_it_was_made_for() -> None:
    trace = training([100_000] * 6, [True] * 6)
    costs = Costs((1e-3,) * len(trace.operations), 1e-5, 0.0, "measured")
    plan = trace.plan("auto", costs, NETWORK, 8)
    assert plan.forecast is not None and plan.bucket_cap_mb == ()
    assert (plan.forecast.network, plan.forecast.world_size, plan.forecast.costs) == (NETWORK, 8, costs)
    text = str(plan)
    assert "chosen by cost" in text
    assert "Expected with measured costs" in text and "on 8 ranks (ring: 10 us and 0.1 GB/s): a step" in text
    shared = fdp.Network(
        1e-5, 1e8, "hierarchical", ranks_per_host=4, inner_latency_s=2e-6, inner_bandwidth_bytes_per_s=5e10, in_flight=2
    )
    words = str(trace.plan("auto", costs=costs, network=shared, world_size=8).forecast)
    assert "between hosts of 4 ranks, 2 us and 50 GB/s within; 2 messages in flight" in words
    assert f"a step of {plan.timeline().step_s * 1e3:.3f} ms" in text
    assert "caps 1, 25 MiB: " in text and "caps inf MiB: " in text
    # A timeline of a plan is by what it was planned for, unless one asks.
    assert plan.timeline() == plan.timeline(NETWORK, 8, costs)
    assert plan.timeline(world_size=64).world_size == 64
    assert plan.timeline(world_size=64).step_s > plan.timeline().step_s


def test_caps_of_the_user_are_kept_and_predicted() -> None:
    trace = training([100_000] * 6, [True] * 6)
    plan = trace.plan(1, Costs((1e-3,) * len(trace.operations), 0.0, 0.0, "measured"), NETWORK)
    assert plan.buckets == trace.plan(1).buckets and plan.bucket_cap_mb == (1.0,)
    assert plan.forecast is not None and plan.forecast.alternatives == () and not plan.forecast.optimal
    assert trace.plan(1).forecast is None


def test_a_single_rank_sends_nothing() -> None:
    trace = training([100_000] * 6, [True] * 6)
    costs = Costs((1e-3,) * len(trace.operations), 1e-5, 1e-9, "measured")
    plan = trace.plan("auto", costs, NETWORK, world_size=1)
    assert plan.buckets == trace.plan("auto").buckets
    timeline = plan.timeline()
    assert timeline.messages == () and timeline.pack_s == 0 and timeline.efficiency == pytest.approx(1)


def test_planning_by_cost_without_a_network_is_refused() -> None:
    trace = training([100], [True])
    costs = Costs((0.0,) * len(trace.operations), 0.0, 0.0, "measured")
    for arguments, said in [({"costs": costs}, "  costs=<Costs of "), ({"world_size": 2}, "  world_size=2")]:
        with pytest.raises(fdp.FdpError) as caught:
            trace.plan("auto", **arguments)
        assert str(caught.value).startswith("step 'step' cannot be planned by cost without a network.\n" + said)
        assert str(caught.value).splitlines()[-1].startswith("Remedy: pass network=")
