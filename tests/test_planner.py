"""Buckets by cost: against every way to cut, and against every fixed cap, with the simulator as the judge."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import optree
import pytest
import torch
from graphs import examples, traces
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import fdp
from fdp.plan import Costs, Plan, Run, Start, Wait, plan_trace
from fdp.plan.buckets import make_buckets
from fdp.plan.planner import FIXED_CAPS_MB
from fdp.plan.schedule import order
from fdp.plan.simulate import outcome
from fdp.plan.ticks import TICKS_PER_S, ticks_of
from fdp.trace import Operation, Reduction, Trace

MIB = 2**20


def training(sizes: list[int], read: list[bool], *, joint: bool = False, others: tuple[int, ...] = ()) -> Trace:
    """The trace of a step: a pass that makes gradients, their means, and updates; in the order of the user's program.

    Args:
        sizes: elements of each gradient, in production order.
        read: whether each has an update.
        joint: whether all updates need one more value that is made of all gradients, as clipping does.
        others: which gradients are of another dtype.
    """
    operations = [Operation("forward", "aten.forward.default", ())]
    reductions: list[Reduction] = []
    for index, size in enumerate(sizes):
        dtype = torch.float64 if index in others else torch.float32
        operations.append(Operation(f"b{index}", "aten.mm.default", (len(operations) - 1,), backward=True))
        reductions.append(
            Reduction(
                f"g{index}",
                "gradient",
                "mean",
                0,
                (size,),
                dtype,
                torch.device("cpu"),
                size * dtype.itemsize,
                "mm",
                len(operations) - 1,
                -1,
                "",
            )
        )
    operations.append(Operation("last", "aten.mm.default", (len(operations) - 1,), backward=True))
    for index, reduction in enumerate(reductions):
        reductions[index] = dataclasses.replace(reduction, operation=len(operations))
        operations.append(Operation(f"m{index}", "fdp.mean", (reduction.position,), reduction=index))
    norm: tuple[int, ...] = ()
    if joint:
        operations.append(Operation("norm", "aten.norm.default", tuple(r.operation for r in reductions)))
        norm = (len(operations) - 1,)
    for index, reduction in enumerate(reductions):
        if read[index]:
            operations.append(Operation("update", "aten._foreach.x", (reduction.operation, *norm), lane=index))
    nothing = optree.tree_structure(())
    return Trace("step", "here:1", 2, (), (), tuple(operations), tuple(reductions), (), (), (),
                 fx.GraphModule(torch.nn.Module(), fx.Graph()), nothing, nothing)  # fmt: skip


def drawn_costs(trace: Trace, rng: random.Random) -> Costs:
    """Costs in microseconds, some of them nothing, at a scale at which they matter."""
    scale = rng.choice([1e-6, 1e-5, 1e-4])
    operations = [rng.choice([0, 1, 2, 5, rng.random()]) * scale for _ in trace.operations]
    start = rng.choice([0, 1e-6, 2e-5])
    return Costs(tuple(operations), start, rng.choice([0, 1e-10, 3e-9]), "estimated")


def drawn_network(rng: random.Random, slowdown: float = 0.0) -> fdp.Network:
    return fdp.Network(
        rng.choice([0, 1e-6, 1e-5, 1e-4]), rng.choice([1e7, 1e8, 1e9]), rng.choice(["ring", "tree"]),
        in_flight=rng.choice([1, 1, 2, 4]), compute_slowdown=slowdown,
    )  # fmt: skip


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
    assert plan.forecast is not None and plan.forecast.optimal
    assert plan.timeline().step_s == best


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
    # What is foretold is what is simulated.
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


@examples(150)
@given(traces(), st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.4]))
def test_no_fixed_cap_ends_earlier_on_any_trace(trace: Trace, seed: int, slowdown: float) -> None:
    """Several kinds, reductions of reductions, all-gathers, broadcasts."""
    check_against_caps(trace, random.Random(seed), slowdown)


@examples(100)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.4]))
def test_no_fixed_cap_ends_earlier_in_training(seed: int, joint: bool, slowdown: float) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    sizes = [rng.choice([1, 1000, 100_000, 300_000, 1_000_000]) for _ in range(count)]
    others = tuple(k for k in range(count) if rng.random() < 0.3) if rng.random() < 0.3 else ()
    check_against_caps(training(sizes, [True] * count, joint=joint, others=others), rng, slowdown)
