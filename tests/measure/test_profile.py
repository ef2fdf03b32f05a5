"""`Step.profile`: a real step on two lanes, which leaves everything as it is."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from refusal_texts import check_message
from samples import exhaustive
from steps import make_state, train

import fdp
from fdp.distributed.group import Group
from fdp.measure.intervals import Event, intervals_between_events, messages
from fdp.measure.profile import profile_step
from fdp.timeline import Timeline

SIZES = (16, 256, 256, 4)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]  # type: ignore[arg-type]


def check_lanes(timeline: Timeline) -> None:
    """What holds for every timeline that was measured."""
    assert timeline.origin == "measured"
    assert timeline.name == "train"
    now = 0.0
    for interval in timeline.compute:
        assert now <= interval.start_s <= interval.end_s <= timeline.step_s
        assert interval.kind in {"forward", "backward", "pack", "optimizer"}
        now = interval.end_s
    starts = [message.start_s for message in timeline.messages]
    assert starts == sorted(starts)
    filled = {interval.bucket: interval.end_s for interval in timeline.compute if interval.kind == "pack"}
    for message in timeline.messages:
        assert message.size_bytes
        assert message.start_s <= message.end_s <= timeline.step_s
        # It starts when its bucket is full, and not before; the machine may have something else to do in between.
        assert message.start_s == pytest.approx(filled[message.bucket], abs=2e-2)


def profile_alone(compile: bool) -> tuple[Timeline, list[bool]]:
    step = fdp.data_parallel(train, donate_argnums=0, compile=compile)
    args = make_state(SIZES), torch.randn(8, SIZES[0])
    before, generator = [tensor.clone() for tensor in tensors_of(args)], torch.get_rng_state()
    timeline = step.profile(*args)
    same = [torch.equal(one, two) for one, two in zip(before, tensors_of(args), strict=True)]
    return timeline, [*same, torch.equal(generator, torch.get_rng_state())]


def test_a_world_of_one_computes_and_sends_nothing() -> None:
    timeline, same = profile_alone(False)
    assert all(same)
    check_lanes(timeline)
    assert timeline.messages == ()
    assert timeline.world_size == 1
    # Nothing is waited for, so there is no gap.
    joints = zip(timeline.compute, timeline.compute[1:], strict=False)
    assert all(one.end_s == two.start_s for one, two in joints)
    assert timeline.compute[-1].end_s == timeline.step_s > 0
    kinds = [interval.kind for interval in timeline.compute]
    assert kinds.index("forward") < kinds.index("backward") < kinds.index("optimizer")
    assert any("_fused_adamw_" in interval.name for interval in timeline.compute if interval.kind == "optimizer")


@exhaustive
def test_a_compiled_step_of_one_rank_is_one_block() -> None:
    timeline, same = profile_alone(True)
    assert all(same)
    assert [interval.name for interval in timeline.intervals] == ["until the end"]
    assert timeline.intervals[0].kind == "backward"


def train_on(options: dict[str, Any], profiles: bool) -> tuple[list[torch.Tensor], list[Any], str]:
    torch.manual_seed(dist.get_rank())
    step = fdp.data_parallel(train, donate_argnums=0, **options)
    state, batch = make_state(SIZES), torch.randn(8, SIZES[0])
    timelines = []
    for at in range(3):
        if profiles and at != 1:
            timelines.append(step.profile(state, batch, repeats=2))
        state, _ = step(state, batch)
    return tensors_of(state), timelines, str(len(step.plan(state, batch).buckets))


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0.05}, pytest.param({"bucket_cap_mb": 0.05, "compile": True}, marks=exhaustive)]
)
def test_profiles_change_nothing_and_tell_of_every_message(options: dict[str, Any]) -> None:
    plain = ranks.run(2, train_on, options, False)
    profiled = ranks.run(2, train_on, options, True)
    for (expected, _, _), (found, timelines, buckets) in zip(plain, profiled, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
        assert len(timelines) == 2
        for timeline in timelines:
            check_lanes(timeline)
            assert timeline.world_size == 2
            assert sorted(message.bucket for message in timeline.messages) == list(range(int(buckets)))
            last = timeline.compute[-1]
            assert (last.kind, last.end_s) == ("optimizer", timeline.step_s)
            # What follows a wait for a message comes after it.
            arrived = {message.bucket: message.end_s for message in timeline.messages}
            updates = [interval for interval in timeline.compute if interval.kind == "optimizer"]
            waiting = [update for update in updates if update.bucket is not None]
            assert waiting and all(arrived[update.bucket] <= update.start_s for update in waiting)


def sleep_in_messages() -> Timeline:
    from fdp.runtime.buffers import Buffer

    start = Buffer.start

    def late(buffer: Buffer, group: Any, *rest: Any) -> Any:
        if buffer.bucket.index == 1 and dist.get_rank() == 1 and isinstance(group, Group):
            time.sleep(0.1)  # so the other rank waits for a message that is under way as long
        return start(buffer, group, *rest)

    Buffer.start = late  # type: ignore[method-assign]
    try:
        step = fdp.data_parallel(train, donate_argnums=0, bucket_cap_mb=0.05)
        timeline: Timeline = step.profile(make_state(SIZES), torch.randn(8, SIZES[0]))
        return timeline
    finally:
        Buffer.start = start  # type: ignore[method-assign]


def test_a_message_that_is_not_hidden_is_exposed_for_as_long() -> None:
    waits, sleeps = ranks.run(2, sleep_in_messages)
    (message,) = (message for message in waits.messages if message.bucket == 1)
    assert message.end_s - message.start_s > 0.05
    assert waits.exposed_s > 0.05
    (slow,) = (i for i in sleeps.compute if i.kind == "pack" and i.bucket == 1 and i.end_s - i.start_s > 0.05)
    assert slow.name == "pack bucket 1"


def test_a_wait_ends_a_message_without_a_reported_arrival() -> None:
    plan = fdp.data_parallel(train).plan(make_state(SIZES), torch.randn(8, SIZES[0]))
    events = [Event("started", 0, 1.0), Event("is waited for", 0, 2.0), Event("was waited for", 0, 3.0)]
    (message,) = messages(plan, events)
    assert (message.start_s, message.end_s) == (1.0, 3.0)
    (message,) = messages(plan, [*events[:1], Event("arrived", 0, 1.5), *events[1:]])
    assert message.end_s == 1.5
    # Reported late: the wait was over before.
    (message,) = messages(plan, [*events, Event("arrived", 0, 4.0)])
    assert message.end_s == 3.0


def test_blocks_lie_between_messages() -> None:
    plan = fdp.data_parallel(train, bucket_cap_mb=0.05).plan(make_state(SIZES), torch.randn(8, SIZES[0]))
    assert len(plan.buckets) > 1
    events, now = [], 0.0
    marks = [("start", b.index) for b in plan.buckets] + [("wait", b.index) for b in plan.buckets]
    for what, bucket in marks:
        names = ("starts", "started") if what == "start" else ("is waited for", "was waited for")
        events += [Event(names[0], bucket, now + 1), Event(names[1], bucket, now + 3)]
        now += 3
    found = intervals_between_events(plan, events, now + 1)
    lengths = [(i.kind, i.end_s - i.start_s) for i in found]
    packs, rest = [x for x in lengths if x[0] == "pack"], [x for x in lengths if x[0] != "pack"]
    assert packs == [("pack", 2.0)] * len(plan.buckets)
    assert all(length == 1 for _, length in rest)
    assert rest[0][0] == "backward"
    assert rest[-1][0] == "optimizer"
    assert len(rest) == len(marks) + 1


@pytest.mark.parametrize("repeats", [0, -1, True, 1.5, None])
def test_a_number_of_repeats_without_meaning(repeats: Any) -> None:
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.data_parallel(train).profile(make_state(SIZES), torch.randn(8, SIZES[0]), repeats=repeats)
    check_message(str(caught.value), "step 'train'", f"repeats={repeats!r}")


def test_messages_out_of_sight_are_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Armed:
        armed = True

    emitted = fdp.data_parallel(train).plan(make_state(SIZES), torch.randn(8, SIZES[0])).emit()
    monkeypatch.setattr(emitted, "program", dataclasses.replace(emitted.program, recording=Armed()))
    with pytest.raises(fdp.CompileError) as caught:
        profile_step(emitted, [], 1)
    check_message(str(caught.value), "step 'train' cannot be profiled", "without CUDA graphs")


def one_dies() -> tuple[str, str, float]:
    from fdp.runtime.buffers import Buffer

    step = fdp.data_parallel(train, donate_argnums=0)
    state, batch = make_state(SIZES), torch.randn(8, SIZES[0])
    state, _ = step(state, batch)
    if dist.get_rank() == 1:
        prove = Buffer.start

        def die(buffer: Buffer, group: Any, *rest: Any) -> Any:
            if isinstance(group, Group):  # in earnest, and not when it is proved what is sent
                os.kill(os.getpid(), signal.SIGKILL)
            return prove(buffer, group, *rest)

        Buffer.start = die  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(fdp.FdpError) as caught:
        step.profile(state, batch)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    env = {"FDP_AGREE_TIMEOUT_S": "5", "RANKS_TIMEOUT_S": "5"}
    first, second = ranks.run_fresh(2, one_dies, env=env, deadline_s=60, grace_s=50)
    assert second.exitcode == -signal.SIGKILL
    assert first.ok, first.describe()
    name, message, waited_s = first.value
    assert name == "PeerError", message
    check_message(message, "train", "rank 0")
    assert waited_s < 30


def one_profiles() -> str:
    step = fdp.data_parallel(train, donate_argnums=0)
    state, batch = make_state(SIZES), torch.randn(8, SIZES[0])
    state, _ = step(state, batch)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(fdp.AgreementError) as caught:
        step.profile(state, batch)
    return str(caught.value)


def test_a_rank_that_profiles_alone_is_told_so() -> None:
    outcomes = ranks.run_fresh(2, one_profiles, env={"FDP_AGREE_TIMEOUT_S": "3"}, deadline_s=60)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].describe()
    check_message(outcomes[0].value, "step 'train' is to be profiled (schedule ", ") on rank 0", "rank 1 did not come")


def profile_unlike(what: str) -> None:
    step = fdp.data_parallel(train, bucket_cap_mb=0.05)
    args = make_state(SIZES), torch.randn(8, SIZES[0])
    other = make_state((16, 64, 4)), torch.randn(8, 16)
    step(*args)
    step(*other)
    odd = dist.get_rank() == 1
    if what == "repeats":
        step.profile(*args, repeats=5 if odd else 2)
    else:
        step.profile(*(other if odd else args))


@pytest.mark.parametrize("what", [pytest.param("repeats", marks=exhaustive), "signature"])
def test_ranks_that_profile_different_things_are_told(what: str) -> None:
    for outcome in ranks.run_fresh(2, profile_unlike, what):
        assert outcome.error is not None and outcome.error.name == "AgreementError", outcome.describe()
        assert "step 'train' is to be profiled (schedule " in outcome.error.message
        assert ("repeats=5" in outcome.error.message) is (what == "repeats")
