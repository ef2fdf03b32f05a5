"""Of large messages that leave each rank a part, two are under way at most, and their memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_traces import traces
from fake_ranks import fake_group
from hypothesis import given
from samples import examples
from schedules import check_order

import fdp
from fdp.plan import Plan, Start, Wait, plan_trace, schedule
from fdp.trace import Trace


def most_under_way(plan: Plan, from_bytes: int) -> int:
    """The most large reduce-scatters that have started and are not waited for, at any time."""
    now, most = set[int](), 0
    for item in plan.schedule:
        if isinstance(item, (Start, Wait)) and plan.buckets[item.bucket].op in ("sum_scatter", "mean_scatter"):
            large = {item.bucket} if plan.buckets[item.bucket].size_bytes >= from_bytes else set()
            now = now | large if isinstance(item, Start) else now - large
            most = max(most, len(now))
    return most


@examples(200)
@given(traces())
def test_two_are_under_way_at_most(trace: Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_FREED_BYTES", 64)
        plan = plan_trace(trace, 1e-9)
    check_order(plan)
    assert most_under_way(plan, 64) <= 2


def planned(width: int, layers: int = 8) -> Plan:
    """The plan of a step on four ranks, of which each gets a part of every gradient."""
    params = {f"w{at}": torch.zeros(width, width) for at in range(layers)}

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
            y = x
            for at in range(layers):
                y = torch.tanh(y @ p[f"w{at}"])
            return y.square().mean()

        return fdp.per_rank(fdp.pmean_scatter(torch.func.grad(loss)(params)))

    return fdp.data_parallel(step, group=fake_group(4), bucket_cap_mb=1e-9).plan(params, torch.zeros(2, width))


def test_small_ones_are_waited_for_when_they_are_needed() -> None:
    assert most_under_way(planned(64), 0) > 2
    assert most_under_way(planned(520), 0) == 2


def test_the_memory_of_gradients_is_used_again() -> None:
    """Whole gradients of three layers are there at once, not of eight; parts of all of them are."""
    plan = planned(520)
    whole = 520 * 520 * 4
    held = max(each.buckets_bytes for each in plan.memory().devices[0].over_time)
    # A bucket is a whole gradient and the rows that arrive of two other ranks; behind it a part is left.
    assert 8 / 4 * whole < held < (3 * 1.5 + 8 / 4) * whole
