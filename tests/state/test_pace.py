"""What is written beside training takes a small share of a processor, until somebody waits for it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from fdp.state import checkpoint_manager
from fdp.state.pace import Pace, Paced


class Clock:
    """Time that passes when somebody sleeps or computes."""

    def __init__(self) -> None:
        self.wall, self.computed, self.slept = 0.0, 0.0, 0.0

    def compute(self, seconds: float) -> None:
        self.wall, self.computed = self.wall + seconds, self.computed + seconds

    def sleep(self, seconds: float | None = None) -> bool:
        self.wall, self.slept = self.wall + (seconds or 0.0), self.slept + (seconds or 0.0)
        return False


def test_what_is_written_slowly_takes_a_small_share_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(), Pace()
    monkeypatch.setattr(time, "monotonic", lambda: clock.wall)
    monkeypatch.setattr(time, "thread_time", lambda: clock.computed)
    monkeypatch.setattr(pace._hurry, "wait", clock.sleep)

    class File:
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def write(self, data: Any) -> int:
            clock.compute(0.01)
            self.parts.append(bytes(data))
            return len(data)

    file = File()
    data = os.urandom(10_000_001)
    assert Paced(file, pace).write(data) == len(data)
    assert b"".join(file.parts) == data
    assert len(file.parts) == 5
    pace.rest()
    assert clock.computed / clock.wall <= 0.0501
    pace.hurry()
    before = clock.slept
    Paced(file, pace).write(data)
    assert clock.slept == before


def test_a_thread_that_writes_is_no_daemon() -> None:
    done = threading.Event()
    writing = checkpoint_manager._Writing(lambda pace: done.set(), 1)
    assert not writing._thread.daemon  # the process waits for it
    writing.wait()
    assert done.is_set()
