"""torch's flight recorder says of each message which bucket it is, with the names of its gradients."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import pytest
import ranks
import torch

import fdp
from fdp.runtime.frames import named_frame


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
