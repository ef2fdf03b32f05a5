"""`bucket_cap_mb="auto"` on real ranks: they measure together, choose alike, and remember what they chose."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from fake_ranks import fake_mesh
from samples import exhaustive

import fdp
import fdp.measure.link
import fdp.step.automatic_buckets
import fdp.step.buckets_on_disk
from fdp.measure import measure_costs

LAYERS, WIDTH = 8, 256
NETWORK = fdp.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)


def update(ws: list[torch.Tensor], batch: torch.Tensor) -> Any:
    """A step that sends 2 MiB."""

    def loss_fn(ws: list[torch.Tensor]) -> torch.Tensor:
        x = batch
        for w in ws:
            x = torch.tanh(x @ w)
        return x.square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)(ws)
    return [w - 0.1 * grad for w, grad in zip(ws, grads, strict=True)], fdp.pmean(loss)


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]


def batch_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def plan_of(step: Any) -> fdp.Plan:
    return list(step._known.values())[-1].emitted.plan


def call_auto() -> tuple[Any, ...]:
    step, fixed = fdp.data_parallel(update), fdp.data_parallel(update, bucket_cap_mb=100)
    found, expected = step(start(), batch_of(16)), fixed(start(), batch_of(16))
    same = all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    forecast = plan_of(step).forecast
    assert forecast is not None
    return plan_of(step).messages, forecast, same, plan_of(fixed).forecast, str(plan_of(step))


def test_ranks_measure_and_choose_alike() -> None:
    (messages, forecast, same, fixed, text), other = ranks.run(2, call_auto)
    assert (messages, forecast) == other[:2]  # to the bit: networks and costs are floats
    assert same and other[2]
    assert fixed is None
    assert forecast.costs.origin == "measured" and min(forecast.costs.operations_s) >= 0
    caps = [other.step_s for other in forecast.alternatives if not other.name.startswith("auto")]
    assert forecast.chosen.step_s <= min(caps)
    # The best on this network alone may be another: of near ties those are taken that hold on others as well.
    assert forecast.chosen.step_s <= 1.01 * min(other.step_s for other in forecast.alternatives)
    assert "chosen by cost" in text and "Expected with measured costs" in text


def one_has_a_short_batch() -> tuple[Any, ...]:
    step = fdp.data_parallel(update)
    ws, _ = step(start(), batch_of(16))
    before = plan_of(step)
    ws, _ = step(ws, batch_of(16 if dist.get_rank() == 0 else 5))
    ahead = step.plan(ws, batch_of(9))
    return before.messages, plan_of(step).messages, ahead.messages, step.traces, ws


def test_a_rank_that_alone_gets_a_new_signature_cuts_as_before() -> None:
    found = ranks.run(2, one_has_a_short_batch)
    assert len({messages for rank in found for messages in rank[:3]}) == 1
    assert [rank[3] for rank in found] == [2, 3]  # the last one is step.plan's
    assert all(torch.equal(a, b) for a, b in zip(found[0][4], found[1][4], strict=True))


def unroll(ws: list[torch.Tensor], batch: torch.Tensor) -> Any:
    """A step with as many operators as its batch is long."""

    def loss_fn(ws: list[torch.Tensor]) -> torch.Tensor:
        x = torch.zeros(WIDTH)
        for row in batch:
            x = torch.tanh((x + row) @ ws[0])
        for w in ws[1:]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    grads = fdp.grad(loss_fn)(ws)
    return [w - 0.1 * grad for w, grad in zip(ws, grads, strict=True)]


def call_unequal(network: fdp.Network | None) -> tuple[Any, ...]:
    step, fixed = fdp.data_parallel(unroll, network=network), fdp.data_parallel(unroll, bucket_cap_mb=100)
    batch = batch_of(5 - 2 * dist.get_rank())
    found, expected = step(start(), batch), fixed(start(), batch)
    same = all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    return plan_of(step).messages, same, len(plan_of(step).trace.operations), plan_of(step).forecast


@pytest.mark.parametrize("network", [pytest.param(NETWORK, marks=exhaustive), None])
def test_ranks_that_run_different_operators_choose_alike(network: fdp.Network | None) -> None:
    first, second = ranks.run(2, call_unequal, network)
    assert first[0] == second[0]
    assert first[1] and second[1]
    assert first[2] > second[2]
    assert first[3] is not None  # of the one whose buckets all take


def one_fails_after_choosing() -> None:
    """What is chosen is what ranks have agreed on before they measured."""
    numbers = iter(range(100))

    def fn(ws: list[torch.Tensor], batch: torch.Tensor) -> Any:
        factor = float(next(numbers)) if dist.get_rank() == 1 else 1.0  # frozen: the check finds that
        grads = fdp.grad(lambda ws: sum((factor * batch @ w.T).square().mean() for w in ws))(ws)
        return [w - grad for w, grad in zip(ws, grads, strict=True)]

    fast_start = fdp.Network(latency_s=0, bandwidth_bytes_per_s=1e6)
    step = fdp.data_parallel(fn, network=fast_start, check_replication=False)
    step([torch.cat(start()[at : at + 4]) for at in (0, 4)], batch_of(3))


def test_a_rank_that_fails_after_choosing_leaves_no_rank_waiting() -> None:
    first, second = ranks.run_fresh(2, one_fails_after_choosing)
    assert second.error is not None and second.error.name == "TraceError"
    assert first.error is not None and first.error.name == "AgreementError", first.describe()
    assert "rank 1 could not prepare step 'fn'" in first.error.message


def goes_on_after_a_failure(where: str) -> list[str]:
    """Rank 1 fails at the first call, where other ranks wait for it; then all call the step twice more."""
    # While it is traced, and in the run by itself that tells whose fault that is.
    failures = [ValueError("once")] * (1 if where == "measuring" else 2) * dist.get_rank()

    def fn(ws: list[torch.Tensor], batch: torch.Tensor) -> Any:
        if where != "measuring" and failures:
            raise failures.pop()
        return update(ws, batch)

    def measure(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return measure_costs(*args)

    options: dict[str, Any] = {"bucket_cap_mb": 1} if where == "caps" else {"network": NETWORK}
    step, found, ws = fdp.data_parallel(fn, check_trace=False, **options), [], start()
    with mock.patch.object(fdp.step.automatic_buckets, "measure_costs", measure):
        for _ in range(3):
            try:
                ws, _ = step(ws, batch_of(16))
                found.append("right")
            except Exception as error:
                found.append(type(error).__name__)
    fdp.assert_replicated(ws)
    return found


@pytest.mark.parametrize("where", ["caps", "auto", "measuring"])
def test_ranks_go_on_together_after_one_failed_at_a_first_call(where: str) -> None:
    """No error is told that all ranks know of: ranks would be out of step from then on."""
    other, failed = ranks.run(2, goes_on_after_a_failure, where)
    assert failed == ["ValueError", "right", "right"] and other == ["AgreementError", "right", "right"]


def look_back() -> tuple[Any, ...]:
    step = fdp.data_parallel(update)
    ws, _ = step(start(), batch_of(16))
    used, same, other = plan_of(step), step.plan(ws, batch_of(16)), step.plan(ws, batch_of(5))
    scaling = fdp.scaling(same, network=NETWORK, world_sizes=[1])
    assert same.forecast is not None
    known = same.forecast == used.forecast, other.forecast is None, scaling.origin
    return *known, same.timeline().step_s == same.forecast.chosen.step_s


def test_what_was_measured_can_be_asked_for_after_the_first_call() -> None:
    first, second = ranks.run(2, look_back)
    assert first == second == (True, True, "measured", True)


def update_in_two_ways(ws: list[torch.Tensor], batch: torch.Tensor, chained: bool) -> Any:
    first = fdp.grad(lambda w: (batch @ w).square().mean())(ws[0])
    moved = ws[0] - first if chained else ws[0]
    second = fdp.grad(lambda w: (batch @ (w + moved)).square().mean())(ws[1])
    return [ws[0] - first, ws[1] - second]


def call_in_two_ways() -> Any:
    network = fdp.Network(latency_s=1e-2, bandwidth_bytes_per_s=1e9)  # all in one bucket
    step = fdp.data_parallel(update_in_two_ways, static_argnums=2, network=network)
    fixed = fdp.data_parallel(update_in_two_ways, static_argnums=2, bucket_cap_mb=1)
    generator = torch.Generator().manual_seed(0)
    ws, batch = [torch.randn(600, 600, generator=generator) / 30 for _ in range(2)], torch.ones(4, 600)
    same, sizes = [], []
    for chained in (False, True):
        found, expected = step(ws, batch, chained), fixed(ws, batch, chained)
        same.append(all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))
        sizes.append([bucket.members for bucket in plan_of(step).buckets])
    return same, sizes


def test_gradients_that_come_to_depend_on_each_other_are_cut_anew() -> None:
    for same, members in ranks.run(2, call_in_two_ways):
        assert same == [True, True] and members == [[(0, 1)], [(0,), (1,)]]


def call_with_network(compile: bool = False) -> Any:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the network was given")

    fdp.step.automatic_buckets.measure_link, kept = refuse, fdp.step.automatic_buckets.measure_link
    try:
        step = fdp.data_parallel(update, network=NETWORK, compile=compile)
        ws, _ = step(start(), batch_of(16))
    finally:
        fdp.step.automatic_buckets.measure_link = kept
    return plan_of(step).forecast, plan_of(step).messages, ws


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=exhaustive)])
def test_a_network_that_is_given_is_not_measured(compile: bool) -> None:
    (forecast, messages, ws), other = ranks.run(2, call_with_network, compile)
    assert forecast.network == NETWORK and forecast.costs.origin == "measured"
    assert forecast == other[0] and messages == other[1]
    assert all(torch.equal(a, b) for a, b in zip(ws, other[2], strict=True))


def call_compiled(measures: bool) -> Any:
    def refuse(*args: Any) -> Any:
        raise AssertionError("measured")

    if not measures:
        fdp.step.automatic_buckets.measure_costs = refuse
    step = fdp.data_parallel(update, compile=True)
    step(start(), batch_of(16))
    return plan_of(step).messages


@exhaustive
def test_a_compiled_step_has_the_same_buckets_at_the_next_start(tmp_path: pathlib.Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def messages(measures: bool) -> Any:
        outcomes = ranks.run_fresh(2, call_compiled, measures, env=env)
        assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
        return [outcome.value for outcome in outcomes]

    first = messages(True)
    assert first[0] == first[1]
    assert len(list((tmp_path / "fdp-plans").iterdir())) == 1
    assert messages(False) == first
    again = ranks.run_fresh(2, call_compiled, False, env={**env, "FDP_MEASURE_AGAIN": "1"})
    assert all(outcome.error is not None and "measured" in outcome.error.message for outcome in again)


def test_what_is_no_plan_is_not_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fdp.step.buckets_on_disk.keep_groups("x", ((0, 2), (1,)))
    members = {0, 1, 2}
    assert fdp.step.buckets_on_disk.find_groups("x", members) == ((0, 2), (1,))
    assert fdp.step.buckets_on_disk.find_groups("y", members) is None
    for text in ("", "[[0, 0], [1, 2]]", "[[0, 1, 2, 3]]", "[[0, 1, 2], []]", "{}7", "[1]", "[[0, 2]]"):
        (tmp_path / "fdp-plans" / "x").write_text(text)
        assert fdp.step.buckets_on_disk.find_groups("x", members) is None, text
    monkeypatch.setenv("FDP_MEASURE_AGAIN", "1")
    fdp.step.buckets_on_disk.keep_groups("x", ((0, 2), (1,)))
    assert fdp.step.buckets_on_disk.find_groups("x", members) is None


def call_small() -> Any:
    def refuse(*args: Any) -> Any:
        raise AssertionError("measured")

    fdp.step.automatic_buckets.measure_costs, kept = refuse, fdp.step.automatic_buckets.measure_costs
    try:
        step = fdp.data_parallel(lambda w, x: w - fdp.grad(lambda w: (x @ w).square().mean())(w))
        step(torch.ones(64), torch.ones(3, 64))
    finally:
        fdp.step.automatic_buckets.measure_costs = kept
    return plan_of(step).forecast


def test_small_steps_are_not_measured() -> None:
    assert ranks.run(2, call_small) == [None, None]


def one_cannot_measure() -> None:
    if dist.get_rank() == 1:

        def fail(*args: Any) -> Any:
            raise MemoryError("no memory left for a dry run")

        fdp.step.automatic_buckets.measure_costs = fail
    fdp.data_parallel(update)(start(), batch_of(16))


def test_a_rank_that_cannot_measure_leaves_no_rank_waiting() -> None:
    outcomes = ranks.run_fresh(2, one_cannot_measure)
    assert outcomes[1].error is not None and outcomes[1].error.name == "MemoryError"
    assert outcomes[0].error is not None and outcomes[0].error.name == "AgreementError"
    assert "step 'update' could not be measured on another rank" in outcomes[0].error.message
    assert "a number as bucket_cap_mb measures nothing" in outcomes[0].error.message


def call_where_nothing_can_be_told() -> Any:
    """The latency is so large that what a few bytes more take is lost in its noise."""
    fdp.measure.link._Messages.seconds = lambda *args: 0.1
    step = fdp.data_parallel(update)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rows in (16, 16, 9):
            found = step(start(), batch_of(rows))
    text = "".join(str(warning.message) for warning in warned)
    expected = fdp.data_parallel(update, bucket_cap_mb=[1, 25])(start(), batch_of(9))
    same = all(torch.equal(one, two) for one, two in zip(found[0], expected[0], strict=True))
    return text, same, len(plan_of(step).buckets)


def test_a_network_that_cannot_be_measured_leaves_the_caps() -> None:
    for outcome in ranks.run_fresh(2, call_where_nothing_can_be_told):
        assert outcome.ok, outcome.describe()
        text, same, buckets = outcome.value
        assert text.count("fdp: buckets of step 'update' have caps of 1 and 25 MiB") == 1
        assert "latency and bandwidth cannot be computed" in text
        assert same and buckets == 2


def test_plans_ahead_rest_on_estimates_where_there_is_a_network() -> None:
    batch = torch.ones(16, WIDTH)
    assert fdp.data_parallel(update).plan(start(), batch).forecast is None
    capped = fdp.data_parallel(update, bucket_cap_mb=1, network=NETWORK).plan(start(), batch)
    assert capped.forecast is not None and capped.forecast.costs.origin == "estimated"
    assert capped.forecast.chosen.name == "1" and capped.bucket_cap_mb == (1.0,)
    alone = fdp.data_parallel(update, network=NETWORK).plan(start(), batch)
    assert alone.bucket_cap_mb == (1.0, 25.0) and alone.timeline(world_size=8).exposed_s > 0


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(fdp.ArgumentError, match="network='fast'") as error:
        fdp.data_parallel(update, network="fast")
    assert "pass fdp.Network(latency_s=..., bandwidth_bytes_per_s=...)" in str(error.value)


def test_a_stored_plan_is_that_of_one_mesh() -> None:
    """The same reductions along other dimensions may not share the same buckets."""

    def name(group: Any, first: str, second: str) -> str:
        step = fdp.data_parallel(lambda s, x: fdp.per_rank((fdp.psum(x, first), fdp.psum(x + 1, second))), group=group)
        trace = step.trace(torch.zeros(3), torch.zeros(3))
        return fdp.step.buckets_on_disk.stored_plan_name(trace, "gloo", ["host"], "")

    wide, tall = fake_mesh(2, 4), fake_mesh(4, 2)
    ways = [(wide, "local", "local"), (wide, "local", "hosts"), (wide, "hosts", "local"), (tall, "local", "local")]
    assert len({name(*way) for way in ways}) == 4
    assert name(*ways[0]) == name(*ways[0])


def test_what_another_planner_chose_is_not_taken() -> None:
    files = {path.name for path in fdp.step.buckets_on_disk._planner()}
    assert {"plan.py", "buckets.py", "chain.py", "network.py"} <= files
