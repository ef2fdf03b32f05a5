"""What is made in memory for a proved program is what it was proved with; otherwise no number is computed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from proved_steps import STEPS, emitted

import fdp
from fdp.emit.codegen.program import Program
from fdp.emit.memory import message_memory
from fdp.emit.memory.allocation import memory_of_body
from fdp.plan import Plan
from fdp.runtime import buffers as placed
from fdp.runtime.buffers import Buffer, all_place_values, make_buffers
from fdp.verify import VerificationError, verify_made

Blocks = dict[torch.device, torch.Tensor]

SPARE_BYTES = 2**22
"""Behind what a step needs, so that what is made too far on can be made."""


def made(plan: Plan, program: Program) -> tuple[Blocks, dict[int, Buffer]]:
    blocks = {
        device: torch.empty(layout.size_bytes + SPARE_BYTES, dtype=torch.uint8, device=device)
        for device, layout in program.layouts.items()
    }
    for function, values in all_place_values(program, blocks):
        function.__globals__.update(values)
    return blocks, make_buffers(plan, program, blocks)


emitted_once = functools.cache(emitted)
"""For tests that leave the plan and the program as they are."""


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_made_right_is_let_through(name: str, world: int) -> None:
    plan, program = emitted_once(name, world)
    blocks, buffers = made(plan, program)
    verify_made(plan, program, blocks, buffers)
    assert program.places


# One thing after the other is made wrong.
def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "lies one element further on": shifted,
    "is a copy": torch.clone,
    "has other strides": lambda t: t.as_strided(t.shape, [2 * step for step in t.stride()], t.storage_offset()),
    "has another shape": lambda t: t.unsqueeze(0),
    "has another type": lambda t: t.view({2: torch.int16, 4: torch.int32, 8: torch.float64}[t.itemsize]),
    "is its negative": torch._neg_view,
    "is missing": lambda t: None,
}


@pytest.mark.parametrize("what", WRONG)
def test_each_place_is_looked_at(what: str) -> None:
    plan, program = emitted_once("everything", 2)
    blocks, buffers = made(plan, program)
    functions = [program.function, *(body.function for body in program.loops.values())]
    assert len(functions) == 2
    looked_at = 0
    for function, values in all_place_values(program, blocks):
        for name, tensor in values.items():
            if tensor.dim() and tensor.dtype == torch.float32:
                function.__globals__[name] = WRONG[what](tensor)
                with pytest.raises(VerificationError, match=f"{name} is not the place that it should be"):
                    verify_made(plan, program, blocks, buffers)
                function.__globals__[name] = tensor
                looked_at += 1
    assert looked_at > 10
    verify_made(plan, program, blocks, buffers)


def test_places_are_objects_of_their_own() -> None:
    """A change of shape in place would turn both."""
    plan, program = emitted("everything", 2)
    blocks, buffers = made(plan, program)
    found: dict[Any, str] = {}
    for name, place in program.places.items():
        if (other := found.setdefault(place, name)) != name and name in program.function.__globals__:
            program.function.__globals__[name] = program.function.__globals__[other]
            break
    with pytest.raises(VerificationError, match="is one object with another place"):
        verify_made(plan, program, blocks, buffers)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", STEPS)
def test_each_part_of_a_bucket_is_looked_at(name: str, what: str) -> None:
    plan, program = emitted_once(name, 3 if name == "parts" else 2)  # of two ranks, none adds up more than two rows
    blocks, buffers = made(plan, program)
    seen = set()
    for index, buffer in buffers.items():
        for part in ("own", "arriving", "result", "received", "message", "header"):
            tensor = getattr(buffer, part)
            if tensor is None or tensor.is_complex():
                continue
            changed = WRONG[what](tensor)
            if changed is None and part in ("own", "message"):
                continue  # without a message what is sent is what this rank contributes
            wrong = dataclasses.replace(buffer, **{part: changed})
            with pytest.raises(VerificationError, match=f"of bucket {index} is not what it should be"):
                verify_made(plan, program, blocks, {**buffers, index: wrong})
            seen.add(part)
    parts = {
        "everything": {"own", "arriving", "message", "header"},
        "narrow": {"own", "received", "message", "header"},
        "parts": {"own", "arriving", "result"},
    }
    assert seen == parts[name] - ({"own", "message"} if what == "is missing" else set())


def test_what_is_said_of_buckets_is_looked_at() -> None:
    plan, program = emitted_once("everything", 2)
    blocks, buffers = made(plan, program)
    for index, buffer in buffers.items():
        wrong = dataclasses.replace(buffer, scaled=not buffer.scaled)
        with pytest.raises(VerificationError, match=f"bucket {index} is .*taken for one that holds shares of means"):
            verify_made(plan, program, blocks, {**buffers, index: wrong})
        wrong = dataclasses.replace(buffer, bucket=dataclasses.replace(buffer.bucket, op="max", root=1))
        with pytest.raises(VerificationError, match=f"bucket {index} is taken for another one"):
            verify_made(plan, program, blocks, {**buffers, index: wrong})
        short = dataclasses.replace(buffer, message=None)
        if buffer.message is not None:
            with pytest.raises(VerificationError, match=f"what is sent of bucket {index} is not what it should be"):
                verify_made(plan, program, blocks, {**buffers, index: short})
    with pytest.raises(VerificationError, match="were made, and not"):
        verify_made(plan, program, blocks, dict(list(buffers.items())[1:]))


def test_memory_that_is_too_small_is_noticed() -> None:
    plan, program = emitted_once("everything", 2)
    blocks, buffers = made(plan, program)
    for wrong in ({}, {device: block[: -SPARE_BYTES - 1] for device, block in blocks.items()}):
        with pytest.raises(VerificationError, match="bytes in a row"):
            verify_made(plan, program, wrong, buffers)


# What happens then.
def test_nothing_runs_in_memory_that_was_made_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = placed._tensor, []

    def wrong(*args: Any) -> torch.Tensor:
        return make(*args).t()

    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        return w - (batch @ w).tanh().sum(), (batch * 2).sum()

    run = fdp.data_parallel(step, donate_argnums=0, check_trace=False, check_replication=False)
    w, batch = torch.ones(4, 4), torch.ones(4, 4)
    expected = step(w.clone(), batch)
    with monkeypatch.context() as patch:
        patch.setattr(placed, "_tensor", wrong)
        for _ in range(2):
            with pytest.raises(
                fdp.TraceError, match="differs from the memory that its program was proved with"
            ) as error:
                run(w, batch)
            assert "Remedy:" in str(error.value)
            calls.append(w.clone())
    assert all(torch.equal(each, torch.ones(4, 4)) for each in calls)
    torch.testing.assert_close(run(w, batch), expected)


def test_the_memory_of_the_body_of_a_loop_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_beginning(node: str, body: Any, around: Any, blocks: Any) -> Any:
        return {device: blocks[device][:size_bytes] for _, (device, size_bytes) in memory_of_body(node, body.layouts)}

    plan, program = emitted("everything", 2)
    ((node, body),) = program.loops.items()
    (device,) = body.layouts
    assert program.layouts[device].offsets["loop", node, device] > 0
    monkeypatch.setattr(placed, "blocks_of_body", at_the_beginning)
    with pytest.raises(VerificationError, match="is not the place that it should be"):
        verify_made(plan, program, *made(plan, program))


@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"parts"}))  # whose messages have none
def test_the_header_of_a_message_has_memory_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (message_memory, placed):
        monkeypatch.setattr(file, "header_numel", lambda bucket, size: 0)
    with pytest.raises(VerificationError, match=r"does not compute what its trace says|lies beyond the memory"):
        emitted(name, 2)
