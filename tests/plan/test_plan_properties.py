"""Properties of every plan, on random traces and random caps; no process group and no device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from drawn_traces import caps, traces
from fake_ranks import fake_group
from hypothesis import given
from printed import table_rows
from samples import ALL_SAMPLES, examples, some
from schedules import bucket_of, check_order, needed_by, positions

import fdp
from fdp.plan import Plan, Run, Start, Wait
from fdp.plan.buckets import resolve_caps
from fdp.trace import Operation, Trace

MIB = 2**20


def is_view(plan: Plan, item: Any) -> bool:
    return isinstance(item, Run) and plan.trace.operations[item.operations[0]].view


def levels_of(plan: Plan) -> list[int]:
    """For each operation, the last bucket that it needs the result of, however indirectly; -1 for none."""
    inside, levels = bucket_of(plan), list[int]()
    for operation in plan.trace.operations:
        levels.append(max((max(levels[n], inside.get(n, -1)) for n in operation.needs), default=-1))
    return levels


def check_buckets(plan: Plan) -> None:
    """Who is in which bucket, and how a bucket is laid out."""
    reductions = plan.trace.reductions
    members = [member for bucket in plan.buckets for member in bucket.members]
    # Every reduction that has elements, exactly once; and never one without.
    assert sorted(members) == [i for i, r in enumerate(reductions) if r.numel]
    caps_mb = resolve_caps(plan.bucket_cap_mb)
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        own = [reductions[member] for member in bucket.members]
        assert {(r.op, r.root, r.dtype, r.device, r.pairs) for r in own} == {
            (bucket.op, bucket.root, bucket.dtype, bucket.device, bucket.pairs)
        }
        # What is split between two ranks has a row for each, with its part of every member.
        rows = 2 if bucket.op in ("sum_scatter", "mean_scatter", "all_to_all") else 1
        assert (bucket.rows, bucket.row_numel * rows) == (rows, bucket.numel)
        # Production order.
        assert list(bucket.members) == sorted(bucket.members)
        # Laid out without overlap, each member aligned to 64 bytes, with no gap that alignment does not need.
        wide = max(1, 64 // bucket.dtype.itemsize)
        ends = [0, *(offset + r.numel // rows for offset, r in zip(bucket.offsets, own, strict=True))]
        assert bucket.offsets == tuple(-(-end // wide) * wide for end in ends[:-1])
        assert bucket.row_numel == ends[-1]
        assert bucket.size_bytes == sum(r.size_bytes for r in own)
        if bucket.op in ("all_gather", "all_to_all"):
            assert len(own) == 1
    levels = levels_of(plan)
    level = {b.index: max(levels[reductions[m].operation] for m in b.members) for b in plan.buckets}
    waits: list[bool] = []  # whether an operation needs any reduction, be it of no elements
    for operation in plan.trace.operations:
        needed = [plan.trace.operations[n].reduction for n in operation.needs]
        waits.append(any(waits[n] for n in operation.needs) or any(r is not None for r in needed))
    kinds: dict[Any, list[int]] = {}
    for bucket in sorted(plan.buckets, key=lambda b: b.members[0]):
        # Nothing that has to wait shares a bucket with what has not.
        alone = {waits[reductions[m].operation] for m in bucket.members}
        assert len(alone) == 1
        kind = (bucket.op, bucket.root, bucket.dtype, bucket.pairs, alone.pop())
        kinds.setdefault(kind, []).append(bucket.index)
    # Over the cap only alone; an all-gather is always alone.
    for indices in kinds.values():
        for nth, index in enumerate(indices):
            cap = caps_mb[min(nth, len(caps_mb) - 1)] * MIB
            assert len(plan.buckets[index].members) == 1 or plan.buckets[index].size_bytes <= cap
    # In the order in which they can start: by the last bucket that they need, then by production.
    assert list(plan.buckets) == sorted(plan.buckets, key=lambda b: (level[b.index], b.members[-1]))


def real_needs(plan: Plan, roots: set[int]) -> set[int]:
    """What is needed, looking through views, of what runs and is no view."""
    inside, found, pending = bucket_of(plan), set[int](), set(roots)
    while pending:
        index = pending.pop()
        if plan.trace.operations[index].view:
            pending |= set(plan.trace.operations[index].needs)
        elif index not in inside:
            found.add(index)
    return found


def check_starts_are_early(plan: Plan) -> None:
    """Nothing that takes time stands between a start and the last thing that it had to come after.

    A bucket has to come after what its members are computed from; after the bucket before it, since all ranks
    start them in one order; and, if it needs another bucket, after the work that does not.
    """
    inside, levels = bucket_of(plan), levels_of(plan)
    needs: dict[int, set[int]] = {}
    for bucket in plan.buckets:
        direct = needed_by(plan, Start(bucket.index))
        level = max((max(levels[n], inside.get(n, -1)) for n in direct), default=-1)
        lower = {i for i, o in enumerate(plan.trace.operations) if levels[i] < level and i not in inside and not o.view}
        needs[bucket.index] = real_needs(plan, direct) | (lower if level >= 0 else set())
    ran: set[int] = set()
    following = 0
    late: list[Any] = []  # what ran since the next bucket could have started
    for item in plan.schedule:
        if isinstance(item, Start):
            assert late == [], f"bucket {item.bucket} starts late"
            following += 1
        elif isinstance(item, Run):
            if following in needs and needs[following] <= ran and not is_view(plan, item):
                late.append(item)
            ran.update(item.operations)


def check_waits_are_late(plan: Plan) -> None:
    """A wait stands directly before the first that reads its bucket, behind all that reads none."""
    inside = bucket_of(plan)
    levels = levels_of(plan)
    for at, item in enumerate(plan.schedule):
        if not isinstance(item, Wait):
            continue
        later = plan.schedule[at + 1 :]
        mine = {k for k, bucket in inside.items() if bucket == item.bucket}
        following = [x for x in later if not isinstance(x, Wait)]
        # Views of other members may come between: they cost nothing.
        while following and is_view(plan, following[0]) and not needed_by(plan, following[0]) & mine:
            following.pop(0)
        assert not following or needed_by(plan, following[0]) & mine, f"{item} is early"
        behind = [
            index
            for x in later
            if isinstance(x, Run) and not is_view(plan, x)
            for index in x.operations
            if levels[index] < 0
        ]
        assert behind == [], f"{behind} need no bucket and are behind {item}"


def check_levels(plan: Plan) -> None:
    """What needs only earlier buckets runs first; within that, the order of the user's program."""
    operations, levels = plan.trace.operations, levels_of(plan)
    keys = [
        (levels[index], index)
        for item in plan.schedule
        if isinstance(item, Run) and not is_view(plan, item)
        for index in item.operations
    ]
    assert keys == sorted(keys)
    # Lanes of one call that wait for the same bucket go together.
    calls: dict[Any, list[Any]] = {}
    for item in plan.schedule:
        if isinstance(item, Run) and operations[item.operations[0]].entry is not None:
            level = {levels[index] for index in item.operations}
            assert len(level) == 1
            calls.setdefault((operations[item.operations[0]].node, level.pop()), []).append(item)
    assert all(len(items) == 1 for items in calls.values())


def check_independent_starts(plan: Plan) -> None:
    """A bucket that needs no other starts before the first wait."""
    levels, starts = levels_of(plan), positions(plan, Start)
    first_wait = min(positions(plan, Wait).values(), default=0)
    for bucket in plan.buckets:
        members = [plan.trace.reductions[member].operation for member in bucket.members]
        if all(levels[member] < 0 for member in members):
            assert starts[bucket.index] < first_wait, f"bucket {bucket.index} starts behind a wait"


PROPERTIES = {
    "every reduction is in exactly one bucket": check_buckets,
    "everything runs once, after what it needs": check_order,
    "buckets start as soon as they are full": check_starts_are_early,
    "waits are as late as the first reader allows": check_waits_are_late,
    "work is ordered by the bucket it waits for": check_levels,
    "a bucket that needs no other starts before any wait": check_independent_starts,
}


@pytest.mark.parametrize("name", list(PROPERTIES))
def test_every_plan(name: str) -> None:
    @examples(200)
    @given(traces(), caps())
    def check(trace: Trace, cap: Any) -> None:
        PROPERTIES[name](trace.plan(cap))

    check()


@examples(50)
@given(traces(), caps())
def test_a_plan_is_a_function_of_the_trace_and_the_caps(trace: Trace, cap: Any) -> None:
    one, two = trace.plan(cap), trace.plan(cap)
    assert one == two
    assert one.messages == two.messages
    assert str(one) == str(two)


@examples(100)
@given(traces())
def test_caps_change_buckets_and_nothing_else(trace: Trace) -> None:
    """From one bucket a reduction to as few as there may be, what runs is the same."""
    fine, coarse = trace.plan(1e-9), trace.plan(1000)
    assert all(len(bucket.members) == 1 for bucket in fine.buckets)
    assert len(coarse.buckets) <= len(fine.buckets)
    for plan in (fine, coarse):
        assert plan.trace is trace
        assert sum(bucket.size_bytes for bucket in plan.buckets) == sum(r.size_bytes for r in trace.reductions)


def test_the_table_has_a_row_for_each_bucket() -> None:
    """The printed plan of a trace with nothing in it, and of one with a bucket that is not read."""
    assert str(planned(nothing_step, 2)).startswith("Plan of nothing_step (test_plan_properties.py:")
    plan = planned(training_step, 2, cap=1e-9)
    rows = table_rows(str(plan))
    assert [row[0] for row in rows] == [str(k) for k in range(7)]
    assert [row[4] for row in rows] == [str(bucket.size_bytes) for bucket in plan.buckets]
    assert rows[0][6] == "the end"  # nothing reads the average of the loss


# --- plans of real steps -----------------------------------------------------------------------------


def nothing_step(state: Any, batch: Any) -> None:
    return None


def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = x
    for name in sorted(params):
        hidden = torch.tanh(hidden @ params[name])
    return (hidden**2).mean()


def training_step(state: Any, batch: Any) -> Any:
    loss, grads = fdp.value_and_grad(loss_of)(state, batch["x"])
    return {k: state[k] - 0.1 * grads[k] for k in state}, fdp.pmean(loss)


def talkative_step(state: Any, batch: Any) -> Any:
    """Every collective, ranks in the computation, a weight from a Python number, noise."""
    loss, grads = fdp.value_and_grad(loss_of)(state, batch["x"] + torch.rand_like(batch["x"]))
    mine = batch["x"].sum() * fdp.axis_index()
    everyone = fdp.all_gather(mine).max()
    weighted = fdp.pmean(loss, weight=len(batch["x"]))
    first = fdp.broadcast(batch["x"][0], root=1)
    total = fdp.psum(batch["x"].long().sum())
    return grads, everyone, weighted, first, total, fdp.per_rank(mine), fdp.pmin(fdp.pmax(loss))


def metric_step(state: Any, batch: Any) -> Any:
    """A metric that is computed from another metric; no gradient depends on either."""
    mean = fdp.pmean(batch["x"].mean(0))
    spread = fdp.pmean(((batch["x"] - mean) ** 2).mean())
    return fdp.grad(loss_of)(state, batch["x"]), spread


@functools.lru_cache
def traced(step: Any, size: int, rank: int, rows: int) -> Trace:
    torch.manual_seed(7 + rank)
    state = {name: torch.ones(4, 4) for name in "abcdef"}
    return fdp.data_parallel(step, group=fake_group(size, rank)).trace(state, {"x": torch.randn(rows, 4)})


def planned(step: Any, size: int, rank: int = 0, cap: Any = "auto", rows: int = 5) -> Plan:
    return traced(step, size, rank, rows).plan(cap)


STEPS = [nothing_step, training_step, talkative_step, metric_step]


@pytest.mark.parametrize("step", some(STEPS))
@pytest.mark.parametrize("cap", ["auto", 1e-9])
def test_the_plan_is_the_same_on_every_rank(step: Any, cap: Any) -> None:
    plans = [planned(step, 4, rank, cap) for rank in (range(4) if ALL_SAMPLES else (0, 3))]
    for plan in plans[1:]:
        assert plan.schedule == plans[0].schedule
        assert plan.buckets == plans[0].buckets
        assert plan.messages == plans[0].messages
        assert plan == plans[0]


@pytest.mark.parametrize("step", some(STEPS))
def test_a_shorter_batch_leaves_the_messages_as_they_are(step: Any) -> None:
    assert planned(step, 2, rows=5).messages == planned(step, 2, rows=1).messages


@pytest.mark.parametrize("name", list(PROPERTIES))
@pytest.mark.parametrize("step", STEPS)
def test_plans_of_real_steps(step: Any, name: str) -> None:
    for cap in ("auto", 1e-9, [64 / MIB, 150 / MIB]):
        PROPERTIES[name](planned(step, 2, cap=cap))


def test_a_metric_computed_from_a_metric_does_not_hold_back_gradients() -> None:
    """All gradients are on the wire before anything is waited for, though the second metric needs the first."""
    plan = planned(metric_step, 2)
    gradients = {
        bucket.index
        for bucket in plan.buckets
        if any(plan.trace.reductions[member].kind == "gradient" for member in bucket.members)
    }
    starts = positions(plan, Start)
    first_wait = min(positions(plan, Wait).values())
    assert gradients and all(starts[index] < first_wait for index in gradients)


def test_the_update_of_one_bucket_runs_while_the_next_is_on_the_wire() -> None:
    """Wait, update, wait, update; and no update before the last gradient has been sent off."""
    plan = planned(training_step, 2, cap=1e-9)
    kinds = [
        "start" if isinstance(item, Start) else "wait" for item in plan.schedule if isinstance(item, (Start, Wait))
    ]
    count = len(plan.buckets)
    assert count == 7  # six gradients and the loss
    assert kinds == ["start"] * count + ["wait"] * count
    waits = [item.bucket for item in plan.schedule if isinstance(item, Wait)]
    gradient_waits = [w for w in waits if plan.trace.reductions[plan.buckets[w].members[0]].kind == "gradient"]
    assert gradient_waits == sorted(gradient_waits)
    after = plan.schedule[positions(plan, Wait)[gradient_waits[0]] + 1]
    assert isinstance(after, Run) and plan.trace.operations[after.operations[0]].target == "aten.mul.Tensor"


def test_a_list_of_caps_is_taken_in_turn() -> None:
    """64 bytes a gradient: one, then two, then three at a time, and three for all that follow."""
    trace = planned(training_step, 2).trace
    sizes = [
        len([m for m in bucket.members if trace.reductions[m].kind == "gradient"])
        for bucket in trace.plan([64 / MIB, 128 / MIB, 192 / MIB]).buckets
    ]
    # The loss (4 bytes) is the first to be produced and takes the first bucket with no room for a gradient.
    assert sizes == [0, 2, 3, 1]


def test_operations_have_nothing_that_a_plan_may_change() -> None:
    operation = Operation("n", "aten.x", ())
    with pytest.raises(AttributeError):
        operation.needs = (1,)  # type: ignore[misc]
