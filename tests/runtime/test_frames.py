"""torch's flight recorder says of each message which bucket it is; a frame is known to have ended, in any thread."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import pickle
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import ranks
import torch

import fdp
from fdp.runtime.frames import has_ended, named_frame


def recorded() -> tuple[list[list[str]], int]:
    """Of each message of two calls: the names of the frames in which it started, and how many buckets there are."""

    def train(w: Any, batch: Any) -> Any:
        _, grads = fdp.value_and_grad(lambda w: ((batch @ w["layer 1"]) * w["it's\n2"]).sum())(w)
        return {name: w[name] - 0.1 * grads[name] for name in w}

    step = fdp.data_parallel(train, bucket_cap_mb=1e-6, wire_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    state = {"layer 1": torch.ones(4), "it's\n2": torch.ones(3)}
    state = step(state, torch.ones(3, 4))
    before = len(_entries())
    state = step(step(state, torch.ones(3, 4)), torch.ones(3, 4))
    names = [[frame["name"] for frame in entry["frames"]] for entry in _entries()[before:]]
    return names, len(step.plan(state, torch.ones(3, 4)).buckets)


def _entries() -> list[Any]:
    dump = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    return pickle.loads(dump)["entries"]  # type: ignore[no-any-return]


def test_the_flight_recorder_names_the_bucket_of_each_message() -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "2000"}
    for outcome in ranks.run_fresh(2, recorded, env=env):
        assert outcome.ok, outcome.describe()
        messages, buckets = outcome.value
        assert buckets == 2
        # Added up in a wider dtype, each takes two messages; the second one starts in a call for another bucket.
        named = [next(name for name in frames if name.startswith("fdp: ")) for frames in messages]
        assert len(named) == 2 * 2 * buckets
        for bucket in range(buckets):
            assert sum(f"the mean of bucket {bucket}: " in name for name in named) == 4
        assert any("layer 1" in name for name in named)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "é" * 10_000, "[red]\n'\""])
def test_any_name_is_a_frames(name: str) -> None:
    found = named_frame(name)(lambda: sys._getframe(1).f_code.co_name)
    found.encode()
    assert "\0" not in found
    assert len(found) < 310


def test_what_it_calls_returns_and_raises_as_ever() -> None:
    frame = named_frame("x")
    assert frame(os.path.join, "a", "b") == os.path.join("a", "b")
    with pytest.raises(ZeroDivisionError):
        frame(lambda: 1 / 0)


def test_a_frame_runs_until_its_function_ends_in_whichever_thread() -> None:
    begun, end = threading.Event(), threading.Event()
    frames: list[FrameType] = []

    def inner() -> None:
        begun.set()
        end.wait(60)

    def outer() -> None:
        frames.append(sys._getframe())
        inner()
        raise KeyboardInterrupt

    def work() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            outer()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    assert not has_ended(frames[0])
    end.set()
    thread.join(60)
    assert has_ended(frames[0])


def test_no_part_asks_the_interpreter_for_the_frames_of_all_threads() -> None:
    """In Python 3.11 that may wait for ever; a test that looks for the hang would see it once in thousands of calls."""
    forbidden = {"_current_frames", "_current_exceptions"}
    for path in pathlib.Path(fdp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert getattr(node, "attr", None) not in forbidden, (path, node.lineno)
