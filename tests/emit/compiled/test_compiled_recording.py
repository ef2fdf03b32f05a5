"""A compiled step as one CUDA graph: what is recorded when, on a device that is none; and on a CUDA device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import models
import optree
import pytest
import torch

import fdp
from fdp.distributed.group import Group
from fdp.emit.compiled.recording import Recording, why_not_recorded


class Tape:
    """Stands in for a CUDA graph: runs on the same tensors what was run while it recorded."""

    made: ClassVar[list[Tape]] = []
    breaks: ClassVar[str] = ""

    def __init__(self) -> None:
        self.replays = 0
        Tape.made.append(self)

    def record(self, work: Callable[[], Any]) -> Any:
        if self.breaks == "record":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self._work = work
        # Like a capture, this must leave no trace; so it is done on memory that is put back.
        held = [cell.cell_contents for cell in work.__closure__ or ()]  # type: ignore[attr-defined]
        inputs = next(value for value in held if isinstance(value, Recording))._inputs
        before = [x.clone() for x in inputs]
        self._out = work()
        for x, y in zip(inputs, before, strict=True):
            x.copy_(y)
        return self._out

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self._out, self._work(), strict=True):
            kept.copy_(new if self.breaks != "replay" else new + 1)


def program(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Adds a batch (1) to a donated state (0), and returns their product; 2 is a slot."""
    state, batch, slot = inputs
    inputs.clear()
    slot.copy_(batch)
    state.add_(slot)
    return [state * batch]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setattr(Tape, "made", [])
    monkeypatch.setattr(Tape, "breaks", "")
    made = Recording("step", program, 2, frozenset({0}), compares=True, graph=Tape)
    made.armed = True
    return made


def run(recording: Recording, state: torch.Tensor, slot: torch.Tensor, calls: int) -> None:
    """Calls it with another batch each time, and compares with arithmetic."""
    for number in range(calls):
        batch, before = torch.full((3,), float(number)), state.clone()
        inputs = [state, batch, slot]
        (out,) = recording(inputs)
        assert inputs == []
        assert torch.equal(state, before + number)
        assert torch.equal(out, state * number)
        assert torch.equal(batch, torch.full((3,), float(number)))


def test_a_step_is_recorded_after_it_is_warm_and_then_replayed(recording: Recording) -> None:
    run(recording, torch.zeros(3), torch.zeros(3), 7)
    (tape,) = Tape.made
    assert tape.replays == 5


def test_what_a_replay_returns_is_not_overwritten_by_the_next(recording: Recording) -> None:
    state, slot = torch.zeros(3), torch.zeros(3)
    run(recording, state, slot, 4)
    (one,) = recording([state, torch.ones(3), slot])
    kept = one.clone()
    recording([state, torch.full((3,), 5.0), slot])
    assert torch.equal(one, kept)


def test_state_in_another_place_runs_without_the_graph(recording: Recording) -> None:
    state, slot = torch.zeros(3), torch.zeros(3)
    run(recording, state, slot, 4)
    with pytest.warns(UserWarning, match="its donated state is in another place than when it was recorded, so it runs"):
        run(recording, torch.ones(3), slot, 2)
    run(recording, state, slot, 2)
    (tape,) = Tape.made
    assert tape.replays == 4


def test_state_that_moves_at_every_call_is_not_recorded(recording: Recording) -> None:
    slot, kept = torch.zeros(3), [torch.zeros(3) for _ in range(6)]
    with pytest.warns(UserWarning, match="its donated state was in another place at each call; pass the state that"):
        for state in kept:
            recording([state, torch.ones(3), slot])
    run(recording, torch.zeros(3), slot, 4)
    assert Tape.made == []


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_no_rank_records_unless_all_do(recording: Recording, answers: list[bool]) -> None:
    left = list(answers)
    recording._all_say = lambda yes: left.pop(0) and yes
    with pytest.warns(UserWarning, match="another rank could not" if len(answers) > 1 else "in another place"):
        run(recording, torch.zeros(3), torch.zeros(3), 6)
    assert [tape.replays for tape in Tape.made] == [0] * (len(answers) - 1)


def test_a_program_that_is_not_armed_runs_as_it_is(recording: Recording) -> None:
    recording.armed = False
    run(recording, torch.zeros(3), torch.zeros(3), 6)
    assert Tape.made == []


def test_a_failed_recording_leaves_the_program_as_it_is(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "breaks", "record")
    text = "step 'step' could not be recorded as a CUDA graph and runs without: operation not permitted when stream is"
    with pytest.warns(UserWarning, match=text):
        run(recording, torch.zeros(3), torch.zeros(3), 6)


def test_a_replay_that_computes_something_else_is_found_and_mended(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tape, "breaks", "replay")
    with pytest.warns(UserWarning, match="the CUDA graph of step 'step' did not compute what the step computes"):
        run(recording, torch.zeros(3), torch.zeros(3), 6)
    assert Tape.made[0].replays == 1


def test_on_a_cpu_the_reason_is_given_and_the_step_runs() -> None:
    step = fdp.data_parallel(lambda w, x: w * x.mean(), check_replication=False)
    plan = step.plan(torch.ones(2), torch.ones(3))
    why = "it runs on the CPU, and a CUDA graph holds the work of a CUDA device"
    assert why_not_recorded(plan, Group(None, 1, 0)) == why
    with pytest.warns(UserWarning, match=f"'<lambda>' is compiled, and not recorded as a CUDA graph: {why}."):
        emitted = plan.emit(compile={"mode": "reduce-overhead"})
    assert torch.equal(emitted(torch.ones(2), torch.ones(3)), torch.ones(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_a_recorded_step_computes_what_a_plain_one_does() -> None:
    apply, params, buffers = fdp.from_module(models.mlp().cuda())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    start = {"params": params, "buffers": buffers, "opt": optimizer.init(params)}
    start = optree.tree_map(lambda leaf: leaf.cuda(), start)
    step_fn, ends = models.fdp_step(apply, optimizer), []
    for compile in (False, {"mode": "reduce-overhead"}):
        step, state = fdp.data_parallel(step_fn, donate_argnums=0, compile=compile), copy.deepcopy(start)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in models.batches("mlp", 8, 4):
                state, _ = step(state, {k: v.cuda() for k, v in batch.items()})
        ends.append(state)
    for one, two in zip(*map(optree.tree_leaves, ends), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
