"""Where it ends a step earlier, new parameters are gathered while gradients are still computed, not behind them."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from drawn_traces import traces
from hypothesis import given
from hypothesis import strategies as st
from samples import ALL_SAMPLES, examples, exhaustive
from schedules import check_order
from sharded_steps import numbers

import fdp
from fdp import optim, pytree
from fdp.plan import Plan, Start, Wait, build
from fdp.plan.buckets import gathered_sooner, partition_by_caps, upstream_of
from fdp.plan.build import plan_groups
from fdp.plan.cost.estimate import Machine, estimate
from fdp.trace import Trace

LAYERS, WIDTH = 6, 520  # a matrix is more than 1 MiB, so each is gathered by a message of its own


@examples(200)
@given(traces(), st.sampled_from([1e-9, 0.001, 1.0]), st.integers(0, 5))
def test_any_order_of_buckets_becomes_a_schedule_that_is_right(trace: Trace, cap: float, lag: int) -> None:
    groups = partition_by_caps(trace.reductions, trace.operations, [cap])
    upstream = upstream_of(trace.reductions, trace.operations)
    sooner = gathered_sooner(groups, trace.reductions, upstream, lag)
    assert sorted(sooner) == sorted(groups)
    check_order(plan_groups(trace, sooner))


@examples(50)
@given(traces(), st.integers(0, 5))
def test_a_bucket_is_not_started_before_those_that_it_waits_for_or_too_soon(trace: Trace, lag: int) -> None:
    groups = partition_by_caps(trace.reductions, trace.operations, [1e-9])
    upstream = upstream_of(trace.reductions, trace.operations)
    sooner = gathered_sooner(groups, trace.reductions, upstream, lag)
    at = {members[0]: index for index, members in enumerate(sooner)}
    free = [index for index, (first, *_) in enumerate(sooner) if not upstream[first]]
    for (first,), index in zip(sooner, range(len(sooner)), strict=True):
        needed = [at[k] for k in at if upstream[first] >> k & 1]
        assert all(before < index for before in needed)
        if needed and trace.reductions[first].op == "all_gather" and index < max(free, default=-1):
            assert sum(max(needed) < other < index for other in free) >= lag


def sharded_optimizer(x: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
    """A step, what makes its state, and its batch."""
    params = {f"w{at}": numbers(WIDTH, WIDTH, seed=at) / 12 for at in range(LAYERS)}
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for at in range(LAYERS):
            x = torch.tanh(x @ p[f"w{at}"])
        return x.square().mean()

    def train(state: Any, x: torch.Tensor) -> Any:
        value, grads = fdp.value_and_grad(loss)(state["params"], x)
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(value)

    def state(sharded: bool) -> Any:
        copies = pytree.map_leaves(torch.clone, params)
        opt = optimizer.init(copies)
        return {"params": copies, "opt": fdp.shard(opt) if sharded else opt}

    return train, state, x


def is_sent_among_gradients(plan: Plan) -> tuple[bool, bool]:
    """Whether a gather is started before the last gradient, and whether something is waited for before that."""
    items = [item for item in plan.schedule if isinstance(item, (Start, Wait))]
    last = max(
        at
        for at, item in enumerate(items)
        if plan.buckets[item.bucket].op == "mean_scatter" and isinstance(item, Start)
    )
    started = [plan.buckets[item.bucket].op for item in items[:last] if isinstance(item, Start)]
    return "all_gather" in started, Wait in map(type, items[:last])


def with_gathers_after(lag: int | None, compile: bool, calls: int = 3) -> tuple[tuple[bool, bool], bool]:
    """How a step is planned, and whether it computes what the one on whole state does."""
    train, state, x = sharded_optimizer(numbers(64, WIDTH, seed=9) + fdp.axis_index())
    mine, whole = state(True), state(False)
    plain = fdp.data_parallel(train, bucket_cap_mb=1.5, compile=compile, check_trace=False)
    same = []
    with pytest.MonkeyPatch.context() as patch:
        if lag is not None:
            patch.setattr(build, "partition_by_caps", lambda reductions, operations, caps: gathered_sooner(
                partition_by_caps(reductions, operations, caps), reductions, upstream_of(reductions, operations), lag
            ))  # fmt: skip
        step = fdp.data_parallel(train, donate_argnums=0, bucket_cap_mb=1.5, compile=compile)
        for _ in range(calls):
            mine, loss = step(mine, x)
            whole, expected = plain(whole, x)
            pairs = zip(pytree.leaves_of((fdp.unshard(mine), loss)), pytree.leaves_of((whole, expected)), strict=True)
            same += [torch.allclose(a, b, rtol=0, atol=1e-6 if compile else 0) for a, b in pairs]
        return is_sent_among_gradients(step.plan(mine, x)), all(same)


@pytest.mark.parametrize(
    ("lag", "compile"),
    [
        pytest.param(0, False, marks=exhaustive),
        (1, False),
        pytest.param(4, False, marks=exhaustive),
        pytest.param(1, True, marks=exhaustive),
    ],
)
def test_a_step_that_gathers_among_gradients_computes_the_same(lag: int, compile: bool) -> None:
    assert ranks.run(2, with_gathers_after, lag, compile) == [((True, True), True)] * 2


def test_without_costs_they_are_sent_behind_them() -> None:
    # One gradient is waited for before the last one starts: its memory is used again.
    assert ranks.run(2, with_gathers_after, None, False, 3 if ALL_SAMPLES else 0) == [((False, True), True)] * 2


def planned(bandwidth: float) -> tuple[tuple[bool, bool], bool]:
    """How gathers are sent by costs of an old accelerator, and whether the step ends much earlier so."""
    train, state, x = sharded_optimizer(numbers(512, WIDTH, seed=9))
    trace = fdp.data_parallel(train, donate_argnums=0).trace(state(True), x)
    costs = estimate(trace, Machine(flops_per_s=1e12, overhead_s=1e-6, start_s=1e-6))
    network = fdp.Network(latency_s=1e-6, bandwidth_bytes_per_s=bandwidth)
    plan = trace.plan(network=network, costs=costs)
    upstream = upstream_of(trace.reductions, trace.operations)
    late = sorted((bucket.members for bucket in plan.buckets), key=lambda members: bool(upstream[members[0]]))
    behind = plan_groups(trace, late).timeline(network, costs=costs).step_s
    sooner = plan.timeline(network, costs=costs).step_s
    assert plan.forecast is not None and plan.forecast.chosen.step_s == sooner <= behind
    return is_sent_among_gradients(plan), sooner < 0.95 * behind


def names_of_gathers() -> list[str]:
    train, state, x = sharded_optimizer(numbers(8, WIDTH, seed=9))
    trace = fdp.data_parallel(train, donate_argnums=0).trace(state(True), x)
    return [reduction.name for reduction in trace.reductions if reduction.op == "all_gather"]


def test_a_message_is_named_after_the_result_that_it_brings() -> None:
    for names in ranks.run(2, names_of_gathers):
        assert sorted(names) == [f"output[0]['params']['w{at}']" for at in range(LAYERS)]


def test_by_cost_they_are_sent_among_gradients_where_that_ends_the_step_earlier() -> None:
    assert ranks.run(2, planned, 5e9) == [((True, True), True)] * 2
    for _, earlier in ranks.run(2, planned, 1e6):
        assert not earlier  # the network is all that counts
