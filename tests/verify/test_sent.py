"""What sends the messages of a program is proved, too: right ones are let through, wrong ones are found out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import fake_group
from proved_steps import emitted
from samples import exhaustive

import fdp
from fdp.plan import Start, Wait
from fdp.runtime import buffers, wide_mean
from fdp.runtime.buffers import Buffer
from fdp.runtime.in_flight import InFlight
from fdp.runtime.proofs import sending
from fdp.runtime.wide_mean import WideMean
from fdp.verify import VerificationError, verify_sent

emitted_once = functools.cache(emitted)


def prove(name: str, world: int = 3, rank: int = 1) -> None:
    plan, program = emitted_once(name, world)
    verify_sent(plan, program, rank, sending(plan, program))


@pytest.mark.parametrize("world", [pytest.param(1, marks=exhaustive), 2, 3])
@pytest.mark.parametrize("name", ["everything", "narrow"])
def test_what_sends_right_is_let_through(name: str, world: int) -> None:
    prove(name, world, world - 1)


def many_means(state: Any, batch: torch.Tensor) -> Any:
    def loss(p: Any) -> torch.Tensor:
        return ((batch @ p["a"]).tanh() @ p["b"]).tanh().square().sum()

    value, grads = fdp.value_and_grad(loss)(state)
    return {name: state[name] - grads[name] for name in state}, fdp.pmean(value), fdp.pmean(batch.sum())


@pytest.mark.parametrize("world", [2, 3])
def test_several_means_in_two_messages(world: int) -> None:
    options = {"wire_dtype": torch.bfloat16, "accumulate_dtype": torch.float32, "bucket_cap_mb": 0.00001}
    step = fdp.data_parallel(many_means, group=fake_group(world), **options)
    made = step.plan({"a": torch.randn(4, 4), "b": torch.randn(4, 3)}, torch.randn(5, 4)).emit(fake_group(world))
    assert sum(bucket.accumulate_dtype is not None for bucket in made.plan.buckets) > 1


# One mistake at a time.


def not_divided(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    if self.arriving is not None or self.bucket.op == "broadcast":
        return right_start(self, group, arrived, into)
    return group.all_reduce(self.own if self.message is None else self.message, "sum", arrived)


def without_header(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    return right_start(dataclasses.replace(self, message=None), group, arrived, into)


def from_rank_0(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    if self.bucket.op == "broadcast":
        return group.broadcast(self.own, 0, arrived)
    return right_start(self, group, arrived, into)


def gathers_twice_the_same(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    if self.arriving is None or self.bucket.op != "all_gather":
        return right_start(self, group, arrived, into)
    wait = group.all_gather(self.arriving, self.own, arrived)
    return lambda: (wait(), self.arriving[0].copy_(self.arriving[1]))  # type: ignore[index]


def changes_what_it_sends(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    wait = right_start(self, group, arrived, into)
    self.own.add_(1)
    return wait


def never_waits(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
    right_start(self, group, arrived, into)
    return lambda: None


right_start = Buffer.start

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "sums in place of means": (not_divided, r"bucket \d+ holds [a-z]+\(bucket \d+\), not [a-z]+\("),
    "messages without their headers": (without_header, "holds the header of bucket 0, not mean"),
    "another root": (from_rank_0, r"bucket \d+ holds [a-z]+\(bucket \d+\), not [a-z]+\("),
    "gathered values are changed": (gathers_twice_the_same, r"bucket \d+ holds"),
    "what is under way is changed": (changes_what_it_sends, "whose message is under way"),
    "results that are not waited for": (never_waits, "whose message is under way"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_sends_wrong_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, message = WRONG[what]
    monkeypatch.setattr(Buffer, "start", wrong)
    with pytest.raises(VerificationError, match=rf"do not carry what its program sends[^!]*{message}"):
        prove("everything")


def turned_by(
    change: Callable[[torch.Tensor, int], torch.Tensor], others: Callable[[list[Any]], Any] = lambda all_: all_[1:]
) -> Any:
    def turn(self: WideMean) -> None:
        if self._finish is not None:
            return
        self._wait()
        total = self._pieces[0].to(self._accumulate)
        for piece in others(list(self._pieces)):
            total += piece
        mean = self._pieces[0].copy_(change(total, self._group.size))
        self._finish = self._group.all_gather(self._own.view_as(self._pieces), mean, self._arrived)

    return turn


TURNS: dict[str, Any] = {
    "not divided": turned_by(lambda total, size: total),
    "divided by another number": turned_by(lambda total, size: total.div_(size + 1)),
    "divided twice": turned_by(lambda total, size: total.div_(size).div_(size)),
    "without the last rank": turned_by(lambda total, size: total.div_(size), lambda all_: all_[1:-1]),
    "with the first rank twice": turned_by(lambda total, size: total.div_(size), lambda all_: all_),
    "in another type": turned_by(lambda total, size: total.to(torch.float64).div_(size)),
    "in another order": turned_by(lambda total, size: total.div_(size), lambda all_: all_[:0:-1]),
}


@pytest.mark.parametrize("what", TURNS)
def test_a_mean_of_pieces_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(WideMean, "turn", turned_by(lambda total, size: total.div_(size)))
        prove("narrow")
    monkeypatch.setattr(WideMean, "turn", TURNS[what])
    with pytest.raises(VerificationError, match=r"bucket \d+ holds .*, not mean\(bucket"):
        prove("narrow")


def test_a_mean_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_mean.WideMean, "finish", lambda self: self.turn())
    with pytest.raises(VerificationError, match="whose message is under way"):
        prove("narrow")


def test_the_first_message_is_there_before_another_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a header says which call it is; then the first bucket lands early, and is not waited for again."""
    group = fake_group(2)
    step = fdp.data_parallel(many_means, group=group, bucket_cap_mb=0.00001)
    plan = step.plan({"a": torch.randn(4, 4), "b": torch.randn(4, 3)}, torch.randn(5, 4))
    program = plan.emit(group).program
    starts = [item for item in plan.schedule if isinstance(item, Start)][:2]
    late_first = dataclasses.replace(plan, schedule=(*starts, Wait(1), Wait(0)))
    verify_sent(late_first, program, 0, sending(plan, program))
    finish = InFlight._finish
    monkeypatch.setattr(InFlight, "_finish", lambda self, index: index and finish(self, index))
    with pytest.raises(VerificationError, match="whose message is under way"):
        verify_sent(late_first, program, 0, sending(plan, program))


def refilled(state: Any, batch: torch.Tensor) -> Any:
    return {"w": fdp.all_gather(batch * 2)}, fdp.pmean(batch.sum())


def test_what_is_gathered_into_memory_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fdp.data_parallel(refilled, group=fake_group(2), donate_argnums=0)
    made = step.plan({"w": torch.zeros(2, 4)}, torch.randn(4)).emit(fake_group(2))
    assert len(made.program.gathered) == 1 and "start(0, " in made.source
    verify_sent(made.plan, made.program, 1, sending(made.plan, made.program))

    def elsewhere(self: Buffer, group: Any, arrived: Any = None, into: Any = None) -> Any:
        return right_start(self, group, arrived, None if into is None else torch.empty_like(into))

    monkeypatch.setattr(Buffer, "start", elsewhere)
    with pytest.raises(VerificationError, match="do not carry what its program sends"):
        verify_sent(made.plan, made.program, 1, sending(made.plan, made.program))


# What happens then.


def test_nothing_runs_that_sends_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fdp.data_parallel(many_means, group=fake_group(2))
    plan = step.plan({"a": torch.randn(4, 4), "b": torch.randn(4, 3)}, torch.randn(5, 4))
    plan.emit(fake_group(2))
    monkeypatch.setattr(buffers.Buffer, "start", not_divided)
    with pytest.raises(fdp.TraceError, match="do not carry what its program sends") as error:
        plan.emit(fake_group(2))
    assert "Remedy:" in str(error.value)
