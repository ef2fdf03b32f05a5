"""The simulator: against a program that follows time from event to event, and by hand; and estimates of costs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import optree
import pytest
import torch
from drawn_traces import traces
from drawn_training import drawn_costs, drawn_network, training
from fake_ranks import fake_group
from hypothesis import given
from hypothesis import strategies as st
from links import occupancy_s
from samples import examples

import fdp
from fdp.plan import Costs, Machine, Plan, Run, Start, estimate, plan_trace, simulate
from fdp.timeline import Interval, Timeline
from fdp.trace import Trace

MIB = 2**20


def by_events(plan: Plan, costs: Costs, network: fdp.Network, size: int) -> tuple[float, float]:
    """When the step ends and how long it waits, in seconds: from one event to the next, with all that goes on at once.

    It knows nothing of when anything is done before it is: it has a list of work for the compute lane, a queue for the
    link, and goes to whichever ends first.
    """
    trace, todo = plan.trace, list(plan.schedule)
    now = waited = 0.0
    left: float | None = None  # of the entry that the compute lane is at
    queue: list[int] = []
    link_s = 0.0  # until when the link takes no message
    under_way: dict[int, float] = {}
    sent: set[int] = set()
    while todo or under_way or queue:
        if queue and link_s <= now + 1e-15:
            bucket = plan.buckets[queue.pop(0)]
            whole = network.message_s(bucket.op, bucket.size_bytes, size)
            under_way[bucket.index] = now + whole
            link_s = now + occupancy_s(network, bucket.op, bucket.size_bytes, size)
            continue
        for index in [k for k, done in under_way.items() if done <= now + 1e-15]:
            del under_way[index]
            sent.add(index)
        item = todo[0] if todo else None
        if left is None and isinstance(item, Run):
            views = [trace.operations[k].view or trace.operations[k].reduction is not None for k in item.operations]
            left = sum(0.0 if view else costs.operations_s[k] for view, k in zip(views, item.operations, strict=True))
        elif left is None and isinstance(item, Start):
            left = costs.start_s + costs.pack_s_per_byte * plan.buckets[item.bucket].size_bytes if size > 1 else 0.0
        elif left is None and item is not None and (size == 1 or item.bucket in sent):
            todo.pop(0)
            continue
        if left is not None and left <= 1e-15:
            if isinstance(item, Start) and size > 1:
                queue.append(item.bucket)
            left = None
            todo.pop(0)
            continue
        speed = 1 - network.compute_slowdown if under_way else 1.0
        nexts = [*under_way.values(), *([link_s] if queue else []), *([now + left / speed] if left is not None else [])]
        if not nexts:
            continue
        until = min(nexts)
        if left is not None:
            left -= (until - now) * speed
        elif item is not None:
            waited += until - now
        now = until
    return now, waited


@examples(200)
@given(traces(), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_the_clock_agrees_with_events(trace: Trace, seed: int, slowdown: float) -> None:
    check_timeline(trace, random.Random(seed), slowdown)


@examples(100)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_the_clock_agrees_with_events_in_training(seed: int, joint: bool, slowdown: float) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    sizes = [rng.choice([1, 1000, 10_000, 100_000]) for _ in range(count)]
    check_timeline(training(sizes, [rng.random() < 0.8 for _ in sizes], joint=joint), rng, slowdown)


def check_timeline(trace: Trace, rng: random.Random, slowdown: float) -> None:
    costs, network, size = drawn_costs(trace, rng), drawn_network(rng, slowdown), rng.choice([1, 2, 8])
    plan = plan_trace(trace, rng.choice([1e-9, 0.01, 1.0]))
    timeline = simulate(plan, costs, network, size)
    # Each of its numbers is rounded to a nanosecond.
    rounding = 2e-9 * (len(plan.schedule) + len(trace.reductions) + 1)
    step_s, exposed_s = by_events(plan, costs, network, size)
    assert timeline.step_s == pytest.approx(step_s, abs=rounding)
    assert timeline.exposed_s == pytest.approx(exposed_s, abs=rounding)
    compute, messages = timeline.compute, timeline.messages
    assert timeline.intervals == (*compute, *messages)
    for lane in (compute, messages):
        assert all(0 <= i.start_s <= i.end_s for i in lane)
        assert [i.start_s for i in lane] == sorted(i.start_s for i in lane)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(compute))
    assert [m.bucket for m in messages] == ([b.index for b in plan.buckets] if size > 1 else [])
    # The compute lane works, or waits for messages, and nothing else.
    assert timeline.compute_s + timeline.pack_s + timeline.exposed_s == pytest.approx(timeline.step_s, abs=1e-12)
    assert timeline.hidden_s + timeline.exposed_s == pytest.approx(timeline.communication_s)
    assert 0 <= timeline.efficiency <= 1 + 1e-12
    if not slowdown:
        assert timeline.alone_s == pytest.approx(timeline.compute_s, abs=1e-12)
    # The critical path has no gap, from the begin to the end; and all of it are parts of what happens.
    path = timeline.critical_path
    assert (path[0].start_s if path else 0.0) == pytest.approx(0, abs=1e-9)
    assert (path[-1].end_s if path else 0.0) == pytest.approx(timeline.step_s, abs=1e-9)
    for one, two in itertools.pairwise(path):
        assert one.end_s == pytest.approx(two.start_s, abs=1e-9)
        if one.lane == "communication" and two.lane == "compute":
            assert one in messages  # all of it, and not a part of one that takes longer
    assert sum(i.end_s - i.start_s for i in path) == pytest.approx(timeline.step_s, abs=1e-8)
    whole = {(i.lane, i.name, i.start_s) for i in timeline.intervals}
    assert {(i.lane, i.name, i.start_s) for i in path} <= whole


def test_by_hand() -> None:
    """Three gradients, each alone in its bucket; times in milliseconds."""
    trace = training([250, 250, 500], [True] * 3)  # forward, three backward, one more; means; three updates
    costs = Costs((4e-3, 2e-3, 2e-3, 2e-3, 1e-3, 0, 0, 0, 1e-3, 1e-3, 1e-3), 0.5e-3, 0.0, "measured")
    network = fdp.Network(1e-3, 1e6)  # two ranks: 2 ms and a millisecond for each 1000 bytes
    plan = plan_trace(trace, 1e-9)
    timeline = simulate(plan, costs, network)
    found = [(i.kind, i.bucket, round(i.start_s * 1e3, 6), round(i.end_s * 1e3, 6)) for i in timeline.intervals]
    assert found == [
        ("forward", None, 0, 4), ("backward", None, 4, 6), ("pack", 0, 6, 6.5), ("backward", None, 6.5, 8.5),
        ("pack", 1, 8.5, 9), ("backward", None, 9, 11), ("pack", 2, 11, 11.5), ("backward", None, 11.5, 12.5),
        # The first is done at 9.5; the second waits for the link, is done at 12.5, and the third at 16.5.
        ("optimizer", 0, 12.5, 13.5), ("optimizer", 1, 13.5, 14.5), ("optimizer", 2, 16.5, 17.5),
        ("message", 0, 6.5, 9.5), ("message", 1, 9.5, 12.5), ("message", 2, 12.5, 16.5),
    ]  # fmt: skip
    assert [i.size_bytes for i in timeline.messages] == [1000, 1000, 2000]
    assert timeline.step_s == pytest.approx(17.5e-3)
    assert (timeline.exposed_s, timeline.hidden_s) == (pytest.approx(2e-3), pytest.approx(8e-3))
    assert (timeline.compute_s, timeline.pack_s) == (pytest.approx(14e-3), pytest.approx(1.5e-3))
    assert timeline.efficiency == pytest.approx(14 / 17.5)
    path = [(i.kind, i.bucket) for i in timeline.critical_path]
    assert path == [("forward", None), ("backward", None), ("pack", 0), ("message", 0), ("message", 1), ("message", 2),
                    ("optimizer", 2)]  # fmt: skip
    # With two in flight a message keeps the link for 1.5 ms or its bytes: the second begins when it is filled.
    two = simulate(plan, costs, fdp.Network(1e-3, 1e6, in_flight=2))
    times = [(round(m.start_s * 1e3, 6), round(m.end_s * 1e3, 6)) for m in two.messages]
    assert times == [(6.5, 9.5), (9, 12), (11.5, 15.5)]
    # At half its speed while a message is under way: from 6.5 to 9.5, and from 10.5 to 13.5.
    slow = simulate(plan, costs, fdp.Network(1e-3, 1e6, compute_slowdown=0.5))
    assert [round(i.end_s * 1e3, 6) for i in slow.compute][:6] == [4, 6, 6.5, 10, 10.5, 14]
    assert slow.alone_s == pytest.approx(14e-3)


def test_a_message_that_waits_for_its_bucket_leads_back_to_the_compute_lane() -> None:
    trace = training([250, 250], [True, True])
    costs = Costs((1e-3, 1e-3, 9e-3, 0, 0, 0, 0, 0), 0.0, 0.0, "measured")
    timeline = simulate(plan_trace(trace, 1e-9), costs, fdp.Network(1e-3, 1e6))
    assert [i.kind for i in timeline.critical_path] == ["forward", "backward", "backward", "message"]


def test_the_path_of_a_measured_step_may_have_gaps() -> None:
    intervals = (
        Interval("compute", "backward", "a", 0.1, 1.0), Interval("compute", "optimizer", "b", 3.0, 4.0, 0),
        Interval("communication", "message", "m", 1.2, 2.9, 0, 10),
    )  # fmt: skip
    timeline = Timeline("step", 2, "measured", intervals, 4.2)
    assert [i.name for i in timeline.critical_path] == ["a", "m", "b"]
    assert timeline.alone_s is None and timeline.efficiency == pytest.approx(1.9 / 4.2)


def test_costs_of_another_step_are_refused() -> None:
    trace = training([10], [True])
    with pytest.raises(fdp.FdpError, match="costs of 1 operations for step 'step', which has 5"):
        simulate(plan_trace(trace), Costs((0.0,), 0.0, 0.0, "measured"), fdp.Network(0, 1e9))
    below = Costs((-1.0,) * 5, float("nan"), 0.0, "measured")
    with pytest.raises(fdp.FdpError, match=r"(?s)no meaning.*start_s: nan.*operations_s\[4\]: -1.0.*Remedy: "):
        simulate(plan_trace(trace), below, fdp.Network(0, 1e9))


def test_a_message_is_used_by_whatever_goes_on_with_it() -> None:
    def joined(ws: list[torch.Tensor], x: torch.Tensor) -> Any:
        """All gradients are read by one operator, and a statistic by the forward pass."""

        def loss_fn(ws: list[torch.Tensor]) -> torch.Tensor:
            hidden = x @ ws[0]
            return torch.tanh((hidden - fdp.pmean(hidden.mean(0))) @ ws[1]).square().mean()

        loss, grads = fdp.value_and_grad(loss_fn)(ws)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        return [w - grad / norm for w, grad in zip(ws, grads, strict=True)], fdp.pmean(loss)

    step: Any = fdp.data_parallel(joined, bucket_cap_mb=1e-4)
    plan = step.plan([torch.ones(8, 8), torch.ones(8, 8)], torch.ones(2, 8))
    timeline = plan.timeline(network=fdp.Network(1e-3, 1e9), world_size=4)
    kinds = [plan.trace.reductions[bucket.members[0]].kind for bucket in plan.buckets]

    def of(kind: str) -> list[Interval]:
        return [m for m in timeline.messages if m.bucket is not None and kinds[m.bucket] == kind]

    assert [m.used_s for m in of("gradient")] == [max(m.end_s for m in of("gradient"))] * 2
    statistic, loss = of("value")
    assert statistic.used_s == statistic.end_s and loss.used_s is None
    assert str(timeline).count("the end") == 1


def test_what_is_no_network_and_what_are_no_costs_is_refused() -> None:
    step: Any = fdp.data_parallel(lambda w, x: fdp.grad(lambda w: (w * x).sum())(w))
    plan = step.plan(torch.ones(3), torch.ones(3))
    refused = {
        "network='fast'": lambda: plan.timeline(network="fast"),
        r"costs=\[1.0\]": lambda: plan.timeline(network=fdp.Network(0, 1e9), costs=[1.0]),
        "network=None": lambda: fdp.scaling(plan, network=None),  # type: ignore[arg-type]
        "network={'latency_s': 0}": lambda: plan.trace.plan(network={"latency_s": 0}),
    }
    for text, ask in refused.items():
        with pytest.raises(fdp.ArgumentError, match=rf"(?s){text}.*Remedy: pass network=fdp.Network\("):
            ask()


def test_a_timeline_needs_a_network() -> None:
    with pytest.raises(fdp.FdpError, match=r"without a network(?s:.)*Remedy: pass network="):
        plan_trace(training([10], [True])).timeline()


# --- real steps, and estimates ------------------------------------------------------------------------

Tree = Any


def traced(optimizer: fdp.optim.Optimizer, batch: int = 8) -> Trace:
    params = {f"w{k}": torch.zeros(64, 64, requires_grad=True) for k in range(3)}

    @fdp.data_parallel(donate_argnums=0, group=fake_group(2))
    def step(state: Tree, x: torch.Tensor) -> Tree:
        def loss_fn(p: Tree) -> torch.Tensor:
            y = x
            for name in p:
                y = (y @ p[name]).tanh()
            return y.square().mean()

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(loss)

    return step.trace({"params": params, "opt": optimizer.init(params)}, torch.ones(batch, 64))


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_has_three_phases(fused: bool) -> None:
    trace = traced(fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=fused))
    timeline = trace.plan(0.02).timeline(fdp.Network(1e-5, 1e9))
    kinds = [i.kind for i in timeline.compute if i.kind != "pack"]
    assert list(dict.fromkeys(kinds)) == ["forward", "backward", "optimizer"]
    # Each update follows the wait for its own bucket.
    waited = [i.bucket for i in timeline.compute if i.kind == "optimizer"]
    assert waited == sorted(waited, key=lambda bucket: -1 if bucket is None else bucket)
    assert {b.index for b in trace.plan(0.02).buckets if b.numel > 1} <= set(waited)


def test_estimates_follow_operations_and_bytes() -> None:
    trace = traced(fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True))
    machine = Machine(flops_per_s=1e9, bytes_per_s=1e9, overhead_s=1e-6)
    costs = estimate(trace, machine)
    by_target: dict[str, list[float]] = {}
    for operation, seconds in zip(trace.operations, costs.operations_s, strict=True):
        if operation.view or operation.reduction is not None:
            assert seconds == 0
        by_target.setdefault(operation.target, []).append(seconds)
    # Products of 8 x 64 by 64 x 64, forward and backward, all of the same number of operations.
    assert by_target["aten.mm.default"] == pytest.approx(
        [1e-6 + 2 * 8 * 64 * 64 / 1e9] * len(by_target["aten.mm.default"])
    )
    assert by_target["aten.tanh.default"] == pytest.approx([1e-6 + 2 * 4 * 8 * 64 / 1e9] * 3)
    # An update reads parameter, gradient, two moments and a counter, and writes all but the gradient.
    (updates,) = [seconds for target, seconds in by_target.items() if "_fused_adamw_" in target]
    assert updates == pytest.approx([1e-6 / 3 + (7 * 4 * 64 * 64 + 4) / 1e9] * 3, rel=1e-3)
    assert costs.start_s == machine.start_s and costs.origin == "estimated"
    assert costs.pack_s_per_byte == 1 / machine.pack_bytes_per_s
    # More samples: more operations, the same updates.
    more = estimate(traced(fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True), batch=80), machine)
    assert sum(more.operations_s) > 5 * (sum(costs.operations_s) - sum(updates))


def test_attention_on_a_cpu_is_counted() -> None:
    shape = (2, 4, 32, 16)

    @fdp.data_parallel(group=fake_group(2))
    def step(state: Tree, x: torch.Tensor) -> Tree:
        return fdp.grad(lambda q: torch.nn.functional.scaled_dot_product_attention(q + x, q, q).sum())(state)

    trace = step.trace(torch.ones(shape), torch.ones(shape))
    costs = estimate(trace, Machine(flops_per_s=1e9, bytes_per_s=float("inf"), overhead_s=0))
    found = [s for o, s in zip(trace.operations, costs.operations_s, strict=True) if "attention" in o.target and s]
    product = 2 * 2 * 4 * 32 * 32 * 16 / 1e9
    assert found == pytest.approx([2 * product, 5 * product])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"flops_per_s": 0}, "flops_per_s: 0 is no rate"),
        ({"flops_per_s": {torch.float16: 1.0}}, "flops_per_s: torch.float32 is missing"),
        ({"flops_per_s": {torch.float32: -1.0}}, "flops_per_s of torch.float32: -1.0 is no rate"),
        ({"bytes_per_s": float("nan")}, "bytes_per_s: nan is no rate"),
        ({"overhead_s": -1}, "overhead_s: -1 is no time"),
        ({"start_s": float("inf")}, "start_s: inf is no time"),
    ],
)
def test_machines_without_meaning_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(fdp.FdpError) as caught:
        Machine(**arguments)
    assert f"  {said}" in str(caught.value) and "Remedy: " in str(caught.value)


def test_a_tree_of_costs_is_a_function_of_the_trace() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.SGD, lr=0.1)
    assert estimate(traced(optimizer)) == estimate(traced(optimizer))
    assert optree.tree_leaves(estimate(traced(optimizer)).operations_s)
