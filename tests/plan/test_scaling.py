"""What-if: a step on other numbers of ranks, and the same step as DDP would run it; no process group and no device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from drawn_traces import traces
from hypothesis import given
from hypothesis import strategies as st
from printed import table_rows
from samples import examples
from torch import nn

import fdp
from fdp.plan import Costs, Network, Plan, Run, Start, Wait, simulate
from fdp.plan.ddp import assign, plan_as_ddp
from fdp.trace import Reduction, Trace

MIB = 2**20
NETWORK = Network(latency_s=50e-6, bandwidth_bytes_per_s=1e9)


def drawn_costs(trace: Trace, seed: int) -> Costs:
    rng = random.Random(seed)
    seconds = [
        0.0 if operation.view or operation.reduction is not None else rng.choice([0.0, 1e-6, 1e-4]) * rng.randint(1, 9)
        for operation in trace.operations
    ]
    return Costs(tuple(seconds), rng.choice([0.0, 1e-5]), rng.choice([0.0, 1e-9]), "estimated")


def perceptron_trace() -> Trace:
    """Four layers; no optimizer class, so that each update is one operator."""
    apply, params, buffers = fdp.from_module(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))

    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return F.mse_loss(apply(params, buffers, batch)[0], batch)

        loss, grads = fdp.value_and_grad(loss_fn)(params)
        return {name: torch.sub(p, grads[name], alpha=0.1) for name, p in params.items()}, fdp.pmean(loss)

    return fdp.data_parallel(train_step).trace(params, torch.randn(8, 512))


# --- DDP -------------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from([1, 100, 1024, 2048, 30_000]), max_size=25),
    cap_bytes=st.sampled_from([0, 4096, 8192, 100_000, MIB]),
    mixed=st.booleans(),
)
@examples(200)
def test_buckets_are_those_of_ddp(sizes: list[int], cap_bytes: int, mixed: bool) -> None:
    dtypes = [torch.float64 if mixed and k % 3 == 0 else torch.float32 for k in range(len(sizes))]
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    caps = (cap_bytes / 4 / MIB, cap_bytes / MIB)
    own = assign(range(len(tensors)), reductions_of(tensors), caps)
    if not tensors:
        assert own == []
        return
    limits = [int(c * MIB) for c in caps]
    theirs, _ = dist._compute_bucket_assignment_by_size(
        tensors, limits, [False] * len(tensors), list(range(len(sizes)))
    )
    if mixed:  # in which order torch takes what is left, a bucket a dtype, nothing says
        own, theirs = sorted(own), sorted(theirs)
    assert [list(group) for group in own] == theirs


def reductions_of(tensors: list[torch.Tensor]) -> list[Reduction]:
    """What `assign` reads of reductions."""
    template = a_gradient()
    return [dataclasses.replace(template, shape=tuple(t.shape), dtype=t.dtype, size_bytes=t.nbytes) for t in tensors]


@functools.cache
def a_gradient() -> Reduction:
    return perceptron_trace().gradients[0]


@given(trace=traces(), seed=st.integers(0, 1000), overlap=st.booleans(), cap=st.sampled_from([0, 0.01, 1]))
@examples(150)
def test_a_plan_of_ddp_runs_everything_once_and_in_order(trace: Trace, seed: int, overlap: bool, cap: float) -> None:
    costs = drawn_costs(trace, seed)
    plan, own_costs = plan_as_ddp(trace, costs, (cap,), overlap)
    runs = [index for item in plan.schedule if isinstance(item, Run) for index in item.operations]
    assert sorted(runs) == [k for k, operation in enumerate(plan.trace.operations) if operation.reduction is None]
    sent = {plan.trace.reductions[m].operation: b.index for b in plan.buckets for m in b.members}
    done: set[int] = set()
    started: list[int] = []
    for item in plan.schedule:
        if isinstance(item, Start):
            started.append(item.bucket)
            for member in plan.buckets[item.bucket].members:
                copies = [k for k in done if k >= len(trace.operations)]
                needs = trace.operations[trace.reductions[member].operation].needs
                assert any(plan.trace.operations[k].needs == needs for k in copies)
        elif isinstance(item, Wait):
            done |= {operation for operation, bucket in sent.items() if bucket == item.bucket}
        else:
            index = item.operations[0]
            needs = set(plan.trace.operations[index].needs)
            # What is no gradient is not sent at all; and a gradient is copied when it is there, through whatever view.
            needs = {k for k in needs if trace.operations[k].reduction is None or k in sent}
            if index >= len(trace.operations):
                needs = {k for k in needs if not trace.operations[k].view}
            assert needs <= done
            done.update(item.operations)
    assert started == [bucket.index for bucket in plan.buckets]
    if not overlap:  # all that comes before the first wait has run when the first message starts
        assert not any(
            isinstance(one, Start) and isinstance(two, Run) for one, two in itertools.pairwise(plan.schedule)
        )
    copied = 2 * sum(bucket.size_bytes for bucket in plan.buckets)
    assert sum(own_costs.operations_s) == pytest.approx(sum(costs.operations_s) + copied * costs.pack_s_per_byte)


def test_ddp_by_hand() -> None:
    trace = perceptron_trace()
    seconds = [0.0 if o.view or o.reduction is not None else 1e-3 for o in trace.operations]
    costs = Costs(tuple(seconds), 0.0, 1e-9, "estimated")
    plan, own = plan_as_ddp(trace, costs, (1.0,))
    # Weights of 1 MiB fill a bucket each; a bias (or two) rides with the weight that comes after it.
    names = [trace.reductions[member].name for bucket in plan.buckets for member in bucket.members]
    assert names == [r.name for r in trace.gradients] and len(plan.buckets) in (4, 5)
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e6)  # a MiB takes a second: nothing is hidden
    timeline = simulate(plan, own, network, 2)
    order = [trace.operations[item.operations[0]] for item in plan.schedule
             if isinstance(item, Run) and item.operations[0] < len(trace.operations)]  # fmt: skip
    before = [k for k, o in enumerate(order) if not o.view][-len(trace.gradients)]
    work = 1e-3 * sum(not o.view for o in order[:before])
    first = trace.gradients[0].position
    last = plan.buckets[-1]
    communication = sum(b.size_bytes for b in plan.buckets) / 1e6
    assert timeline.communication_s == pytest.approx(communication, rel=1e-6)
    # Compute until the first bucket is full, all messages on end, the last copy out, and then the optimizer.
    until = timeline.messages[0].start_s
    assert 1e-3 <= until < work and first >= 0
    copy_s, update_s = last.size_bytes * 1e-9, 1e-3 * len(trace.gradients)
    assert timeline.step_s == pytest.approx(until + communication + copy_s + update_s, rel=1e-6)


def test_a_gan_is_two_backward_passes_of_ddp() -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        d = state["d"] - fdp.grad(lambda d: (d * x).square().mean())(state["d"])
        g = state["g"] - fdp.grad(lambda g: (g * d * x).square().mean())(state["g"])
        return {"d": d, "g": g}

    trace = fdp.data_parallel(step).trace({"d": torch.ones(4), "g": torch.ones(4)}, torch.ones(4))
    plan, _ = plan_as_ddp(trace, Costs((0.0,) * len(trace.operations), 0.0, 0.0, "estimated"))
    messages = [item for item in plan.schedule if not isinstance(item, Run)]
    assert messages == [Start(0), Wait(0), Start(1), Wait(1)]


@given(trace=traces(), seed=st.integers(0, 1000), ranks=st.sampled_from([2, 16, 256]))
@examples(60)
def test_overlap_is_never_slower(trace: Trace, seed: int, ranks: int) -> None:
    costs = drawn_costs(trace, seed)
    ends = [simulate(*plan_as_ddp(trace, costs, overlap=overlap), NETWORK, ranks).step_s for overlap in (True, False)]
    assert ends[0] <= ends[1] + 1e-9


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    return perceptron_trace().plan([1, 25])


def test_each_size_is_what_the_simulator_says(plan: Plan) -> None:
    trace = plan.trace
    costs = drawn_costs(trace, 1)
    found = fdp.scaling(plan, network=NETWORK, world_sizes=[1, 3, 64], costs=costs)
    assert found.alone_s == pytest.approx(sum(costs.operations_s))
    for scale in found.scales:
        assert scale.planned_s == simulate(plan, costs, NETWORK, scale.world_size).step_s
        assert scale.replanned_s <= scale.planned_s
        assert scale.replanned_s <= scale.ddp_s
    one, *others = found.scales
    assert one.planned_s == one.replanned_s == one.ddp_s == found.alone_s
    for scale in others:
        theirs = simulate(*plan_as_ddp(trace, costs), NETWORK, scale.world_size)
        assert scale.ddp_s == theirs.step_s > found.alone_s
        assert theirs.name == "train_step under DDP"


def test_estimated_costs_are_the_default_and_efficiency_falls(plan: Plan) -> None:
    found = fdp.scaling(plan, network=NETWORK)
    assert found.origin == "estimated"
    assert [scale.world_size for scale in found.scales] == [2**k for k in range(11)]
    shares = [found.efficiency(scale.planned_s) for scale in found.scales]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] < 0.5


def test_scaling_prints(plan: Plan) -> None:
    costs = Costs(tuple(0.0 if o.view else 1e-3 for o in plan.trace.operations), 0.0, 0.0, "measured")
    text = str(fdp.scaling(plan, network=NETWORK, world_sizes=[1, 2], costs=costs))
    assert "Scaling of train_step, measured costs" in text and "ring: 50 us and 1 GB/s" in text
    first, second = table_rows(text)
    assert first[0] == "1" and first[5:] == ["100.0%"] * 3
    assert second[0] == "2" and second[1] != second[3]


def test_scaling_draws(plan: Plan, tmp_path: pathlib.Path) -> None:
    found = fdp.scaling(plan, network=NETWORK, world_sizes=[1, 2, 4])
    figure = found.draw(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    by_line = [list(line.get_ydata()) for line in right.get_lines()[:3]]
    assert by_line[1] == pytest.approx([100 * found.efficiency(scale.planned_s) for scale in found.scales])
    assert list(left.get_lines()[2].get_ydata()) == pytest.approx([1e3 * scale.ddp_s for scale in found.scales])
    with pytest.raises(fdp.ArgumentError, match=r"Remedy: give the file one of the suffixes"):
        found.draw("scaling.gif")


@pytest.mark.parametrize("sizes", [[], 8, None, [2, 0], [None], ["2"]])
def test_what_are_no_sizes_is_an_error(plan: Plan, sizes: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match="world_size"):
        fdp.scaling(plan, network=NETWORK, world_sizes=sizes)
