"""What is written beside training takes a small share of a processor, until another thread waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from fdp.state.pace import Pace, Paced, Writing


class Clock:
    """Time that passes when a thread sleeps or computes."""

    def __init__(self) -> None:
        self.wall, self.computed, self.slept = 0.0, 0.0, 0.0

    def compute(self, seconds: float) -> None:
        self.wall, self.computed = self.wall + seconds, self.computed + seconds

    def sleep(self, seconds: float | None = None) -> bool:
        self.wall, self.slept = self.wall + (seconds or 0.0), self.slept + (seconds or 0.0)
        return False


def test_slow_writing_takes_a_small_share_until_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
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
    daemons = []
    Writing(lambda pace: daemons.append(threading.current_thread().daemon), "checkpoint").wait()
    assert daemons == [False]  # the process waits for it


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="interrupts the main thread by a signal")
def test_an_interrupted_wait_is_not_the_end_of_the_writing() -> None:
    let = threading.Event()
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)  # SIGINT may be ignored, as in the background
    writing = Writing(lambda pace: let.wait() and None, "checkpoint")  # type: ignore[func-returns-value]
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(2):
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2)).start()
        with pytest.raises(KeyboardInterrupt):
            writing.wait()
    let.set()
    writing.wait()
    signal.signal(signal.SIGUSR2, before)
    assert writing.error is None


def test_without_a_thread_it_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    writing = Writing(lambda pace: done.append(1), "checkpoint")
    assert done == [1]
    writing.wait()
