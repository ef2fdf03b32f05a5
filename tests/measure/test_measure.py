"""Measured costs and networks: fits are exact on synthetic times, ranks agree to the bit, inputs stay as they are."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from links import occupancy_s
from refusal_texts import check_message
from samples import exhaustive
from steps import make_state, sgd_step, train

import fdp
from fdp.distributed.group import Group, resolve_group
from fdp.distributed.messages import start_all_reduce
from fdp.measure import (
    agreed_costs,
    link,
    measure_agreed_costs,
    measure_costs,
    measure_link,
    measure_machine,
    measure_network,
    operations,
)
from fdp.measure.agreed import agreed_seconds
from fdp.measure.fit import MOST_IN_FLIGHT, fit_line, in_flight_of, ring_numbers, slowdown_of
from fdp.plan import Costs, Network
from fdp.runtime import Emitted, emit_plan

CPU = torch.device("cpu")
SIZES = (64, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
BASES = st.floats(1e-6, 1e-1)
SLOPES = st.floats(1e-11, 1e-6)


# --- fits --------------------------------------------------------------------------------------------------


@given(BASES, SLOPES, st.integers(3, len(SIZES)))
def test_a_line_is_found_again(base: float, slope: float, count: int) -> None:
    sizes = SIZES[:count]
    found = fit_line(sizes, [base + slope * size for size in sizes])
    for size in sizes:
        assert found[0] + found[1] * size == pytest.approx(base + slope * size, rel=1e-6)


@given(BASES, st.integers(16, 20), st.integers(0, len(SIZES) - 1), st.floats(1.5, 100))
def test_one_message_that_was_held_up_does_not_bend_the_line(base: float, even: int, at: int, by: float) -> None:
    """If other messages tell latency and bandwidth: of 2**even bytes half the time is the one, half the other."""
    slope = base / 2**even
    seconds = [base + slope * size for size in SIZES]
    seconds[at] *= by
    found = fit_line(SIZES, seconds)
    for size in SIZES:
        assert 1 / 1.5 < (found[0] + found[1] * size) / (base + slope * size) < 1.5


@given(BASES, SLOPES, st.integers(2, 1024), st.integers(0, 2**30))
def test_ring_numbers_give_the_line_again(base: float, slope: float, world: int, size: int) -> None:
    latency_s, bandwidth = ring_numbers(base, slope, world)
    message_s = Network(latency_s, bandwidth).message_s("mean", size, world)
    assert message_s == pytest.approx(base + slope * size, rel=1e-9)


@given(st.floats(1e-6, 1.0), st.integers(1, MOST_IN_FLIGHT), st.integers(4, 16))
def test_in_flight_is_what_makes_many_small_messages_take_so_long(one_s: float, in_flight: int, count: int) -> None:
    net = Network(one_s / 2, 1e30, in_flight=in_flight)  # of two ranks: two latencies a message
    begin = done = 0.0
    for _ in range(count):
        done = begin + net.message_s("mean", 4, 2)
        begin += occupancy_s(net, "mean", 4, 2)
    assert in_flight_of(one_s, done, count) == in_flight


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3))
def test_a_slowdown_is_one_that_a_network_can_have(alone_s: float, beside_s: float) -> None:
    share = slowdown_of(alone_s, beside_s)
    assert Network(0.0, 1.0, compute_slowdown=share).compute_slowdown == share
    if beside_s <= alone_s:
        assert share == 0
    elif alone_s / beside_s > 0.06:
        assert alone_s / (1 - share) == pytest.approx(beside_s)


@pytest.mark.parametrize("seconds", [[1.0, 1.0, 1.0], [3.0, 2.0, 1.0]])
def test_messages_that_tell_no_bandwidth_are_told_of(seconds: list[float]) -> None:
    with pytest.raises(fdp.ArgumentError) as caught:
        fit_line([0, 10, 100], seconds)
    check_message(str(caught.value), "100 bytes: ", "fdp.Network(")


class Made:
    """Messages that take what a line says, in place of real ones."""

    def __init__(self, base: float, slope: float) -> None:
        self.base, self.slope, self.spent_s = base, slope, 0.0

    def seconds(self, sizes: list[int], repeats: int) -> float:
        self.spent_s += (self.base + self.slope * sum(sizes)) * (1 + repeats)
        return self.base + self.slope * sum(sizes)


@given(BASES.filter(lambda base: base < 1e-3), st.floats(1e-11, 4e-8))
def test_slow_links_are_not_held_up_for_long(base: float, slope: float) -> None:
    """Down to 200 Mbit/s: a second at most, and always enough sizes for a fit."""
    made = Made(base, slope)
    sizes, seconds = link._time_sizes(made)  # type: ignore[arg-type]
    assert made.spent_s < 2.0
    assert len(sizes) >= 3
    assert fit_line(sizes, seconds)[1] == pytest.approx(slope, rel=1e-2) or slope * sizes[-1] < 1e-3 * base


def test_a_latency_that_varies_is_not_taken_for_bandwidth() -> None:
    rng = random.Random(0)

    class Jittery(Made):
        def seconds(self, sizes: list[int], repeats: int) -> float:
            return super().seconds(sizes, repeats) * rng.uniform(0.97, 1.03)

    for _ in range(50):
        sizes, seconds = link._time_sizes(Jittery(0.03, 8e-9))  # type: ignore[arg-type]
        assert fit_line(sizes, seconds)[1] == pytest.approx(8e-9, rel=0.3)


# --- costs -------------------------------------------------------------------------------------------------


def prepared(sizes: tuple[int, ...] = (64, 512, 8), **options: Any) -> tuple[Emitted, list[torch.Tensor]]:
    args = make_state(sizes), torch.randn(32, sizes[0])
    step = fdp.data_parallel(train, donate_argnums=0, **options)
    emitted = emit_plan(step.plan(*args))
    return emitted, [leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]  # type: ignore[arg-type]


def test_costs_are_of_each_operation_and_leave_everything_as_it_is() -> None:
    emitted, tensors = prepared((64, 1024, 4))
    before, generator = [tensor.clone() for tensor in tensors], torch.get_rng_state()
    costs = measure_costs(emitted, tensors, start_s=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(before, tensors, strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    found = emitted.plan.trace.operations
    assert (len(costs.operations_s), costs.start_s, costs.origin) == (len(found), 1e-5, "measured")
    for operation, second in zip(found, costs.operations_s, strict=True):
        if operation.view or operation.reduction is not None:
            assert second == 0
        assert second >= 0
    # The step that is measured packs buckets though there is one rank: a plan is made for many.
    assert costs.pack_s_per_byte > 0


def test_a_large_product_costs_more_than_a_small_one_by_far() -> None:
    @fdp.data_parallel
    def step(w: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        return fdp.pmean((batch @ batch.t()).sum()), w["small"] @ w["small"]

    args = {"small": torch.ones(4, 4)}, torch.ones(1024, 1024)
    emitted: Any = step.plan(*args).emit()
    costs = measure_costs(emitted, [args[0]["small"], args[1]], start_s=0.0)
    large, small = (
        second
        for operation, second in zip(emitted.plan.trace.operations, costs.operations_s, strict=True)
        if operation.target.startswith("aten.mm")
    )
    assert large > 20 * small > 0


@given(st.data())
def test_seconds_are_shared_and_none_is_lost(data: st.DataObject) -> None:
    emitted = SHARED
    plan = emitted.plan
    parts = emitted.timed(lambda: None, apart=True).program.parts
    drawn = data.draw(st.lists(st.integers(0, 10**7), min_size=len(parts), max_size=len(parts)))
    seconds = [number / 1e9 for number in drawn]
    total_s = data.draw(st.floats(1e-4, 1.0))
    costs = operations._costs(plan, parts, seconds, total_s, True, 0.0)
    by_kind = {kind: sum(s for p, s in zip(parts, seconds, strict=True) if p.kind == kind) for kind in KINDS_OF_PARTS}
    packed_bytes = sum(bucket.size_bytes for bucket in plan.buckets)
    counted = sum(by_kind.values())
    scale = total_s / counted if counted else 1.0
    assert sum(costs.operations_s) == pytest.approx(scale * by_kind["run"])
    assert costs.pack_s_per_byte * packed_bytes == pytest.approx(scale * by_kind["pack"])
    # Lanes of one call take what their bytes take: a matrix twice as large twice the time.
    entries = [i for i, o in enumerate(plan.trace.operations) if o.target.startswith("aten._fused_adamw_")]
    w0, w1 = (costs.operations_s[index] for index in entries)
    assert w0 == pytest.approx(8 * w1, rel=1e-3)  # each has a counter of steps besides


KINDS_OF_PARTS = ("run", "pack", "start", "wait")
SHARED = prepared((64, 512, 8))[0]


def test_a_program_with_ticks_is_the_program() -> None:
    emitted, tensors = prepared(bucket_cap_mb=0.01)
    ticks: list[float] = []
    timed = emitted.timed(lambda: ticks.append(time.perf_counter()))
    lines = [line for line in timed.source.splitlines() if line.strip() != "const_tick()"]
    assert [line.replace(", const_tick=const_tick", "") for line in lines] == emitted.source.splitlines()
    with torch.random.fork_rng():
        one = timed.dry_run([tensor.clone() for tensor in tensors])
    two = emitted.dry_run([tensor.clone() for tensor in tensors])
    assert len(ticks) == len(timed.program.parts) + 1
    apart = emitted.timed(lambda: None, apart=True)
    for kind in ("start", "wait"):
        assert sorted(part.index for part in apart.program.parts if part.kind == kind) == list(
            range(len(emitted.plan.buckets))
        )
    between = apart.source.split("const_tick()")[1:-1]
    assert [(part.kind == "start", part.kind == "wait") for part in apart.program.parts] == [
        ("start(" in text, "wait(" in text) for text in between
    ]
    assert all(torch.equal(a, b) for a, b in zip(optree.tree_leaves(one), optree.tree_leaves(two), strict=True))  # type: ignore[arg-type]


def test_a_machine_multiplies_faster_than_it_calls() -> None:
    machine = measure_machine()
    assert 0 < machine.overhead_s < 1e-3
    assert machine.flops_of(torch.float32) > 1e7
    assert machine.bytes_per_s > 1e7


# --- ranks -------------------------------------------------------------------------------------------------


def measure_together() -> Any:
    group, sent = resolve_group(None), []
    first = measure_link(group, CPU)

    def count(*args: Any) -> Any:
        sent.append(args)
        return start_all_reduce(*args)

    link.start_all_reduce = count  # type: ignore[assignment]
    try:
        again = measure_network(group, CPU)
    finally:
        link.start_all_reduce = start_all_reduce
    assert again is first.network
    assert not sent, "it is measured once"
    emitted, tensors = prepared(bucket_cap_mb=0.05)
    costs = measure_agreed_costs(emitted, tensors)
    # Messages that follow are not disturbed.
    after = fdp.psum(torch.tensor(1.0 + dist.get_rank()))
    return first, costs, after.item(), str(emitted.plan.timeline(network=first.network, costs=costs).step_s)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_ranks_measure_the_same_to_the_bit(world: int) -> None:
    found = ranks.run(world, measure_together)
    assert found == [found[0]] * world
    link, costs, after, _ = found[0]
    assert link.network.latency_s > 0
    assert link.network.bandwidth_bytes_per_s > 1e5
    assert costs.start_s == pytest.approx(link.start_s) != 0
    assert sum(costs.operations_s) > 0
    assert after == world * (world + 1) / 2


def agree_on_costs() -> Any:
    group, rank = resolve_group(None), dist.get_rank()
    own = Costs((1e-3 * (rank + 1), 0.0, 1e-9 / 3), 2e-5, 1e-11 * (rank + 1), "measured")
    combined = [agreed_seconds(group, CPU, [1.0 + rank, 2.0 - rank], op) for op in ("mean", "max", "min")]
    return agreed_costs(group, CPU, own), combined


def test_agreed_numbers_are_means_and_extremes() -> None:
    found = ranks.run(3, agree_on_costs)
    assert found == [found[0]] * 3
    costs, combined = found[0]
    assert costs.operations_s == pytest.approx((2e-3, 0.0, 1e-9 / 3), abs=1e-12)
    assert (costs.start_s, costs.pack_s_per_byte) == pytest.approx((2e-5, 2e-11))
    assert combined == [[2.0, 1.0], [3.0, 2.0], [1.0, 0.0]]


def test_one_rank_has_no_network() -> None:
    with pytest.raises(fdp.ArgumentError) as caught:
        measure_network(Group(None, 1, 0), CPU)
    check_message(str(caught.value), "world of one", "fdp.Network(")
    costs = Costs((random.random(),), 1e-5, 1e-10, "measured")
    assert agreed_costs(Group(None, 1, 0), CPU, costs) == dataclasses.replace(costs)


def one_dies(when: str) -> tuple[list[str], str, float]:
    group, rank = resolve_group(None), dist.get_rank()

    def die(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and when == "in the middle":
        link._time_beside = die
    start = time.monotonic()
    if rank == 1 and when == "before":
        die()
    try:
        measure_network(group, CPU)
    except fdp.FdpError as error:
        names = [type(error).__name__]
        try:
            measure_network(group, CPU)
        except fdp.FdpError as second:
            names.append(type(second).__name__)
        return names, str(error), time.monotonic() - start
    return [], "", 0.0


@pytest.mark.parametrize("when", ["before", pytest.param("in the middle", marks=exhaustive)])
def test_a_rank_that_dies_is_an_error_on_the_others(when: str) -> None:
    env = {"FDP_AGREE_TIMEOUT_S": "3", "RANKS_TIMEOUT_S": "5"}
    first, second = ranks.run_fresh(2, one_dies, when, env=env, deadline_s=60, grace_s=50)
    assert second.exitcode == -signal.SIGKILL
    assert first.ok, first.describe()
    names, message, waited_s = first.value
    assert names == (["AgreementError", "AgreementError"] if when == "before" else ["PeerError", "PeerError"]), message
    check_message(message, "rank 1" if when == "before" else "rank 1 died")
    assert waited_s < 30


def do_something_else() -> str:
    with pytest.raises(fdp.AgreementError) as caught:
        if dist.get_rank() == 0:
            measure_network(resolve_group(None), CPU, torch.float64)
        else:
            fdp.data_parallel(sgd_step)({"a": torch.ones(3)}, {"x": torch.ones(2)})
    return str(caught.value)


def test_ranks_that_do_different_things_are_told_so() -> None:
    outcomes = ranks.run_fresh(2, do_something_else, env={"FDP_AGREE_TIMEOUT_S": "20"}, deadline_s=60)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].describe()
    check_message(outcomes[0].value, "the network for torch.float64 on cpu is to be measured", "rank 1: step sgd_step")
    check_message(outcomes[1].value, "sgd_step", "the network for torch.float64 on cpu is to be measured")
