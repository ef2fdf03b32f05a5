"""Writing beside training, slowly enough that training is not slowed down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from fdp.errors import first_line

_LOG = logging.getLogger("fdp")

_PIECE = 2**21
"""Bytes that are written at once: a millisecond's work."""
_SHARE = 0.05
"""A share of one processor's time."""


class Pace:
    """Keeps a thread at a small share of one processor's time, until another thread waits for it.

    What counts is the time in which it computes and copies. Time in which it waits for the disk is free.
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._begun: tuple[float, float] | None = None

    def hurry(self) -> None:
        """Write at full speed from now on."""
        self._hurry.set()

    def rest(self) -> None:
        """Sleep until the thread is within its share again. The writing thread calls this often."""
        now = time.monotonic(), time.thread_time()
        if self._begun is None:
            self._begun = now
        due_s = (now[1] - self._begun[1]) / _SHARE - (now[0] - self._begun[0])
        # A process that ends waits for its threads.
        while due_s > 0 and not self._hurry.is_set() and threading.main_thread().is_alive():
            self._hurry.wait(min(due_s, 0.5))
            due_s -= 0.5


class Writing:
    """Something that a thread is writing.

    The process waits for the thread when it ends, as for any that is no daemon.

    Args:
        write: writes it.
        name: of what is written, for messages.

    Attributes:
        error: what went wrong; None while nothing has.
    """

    def __init__(self, write: Callable[[Pace], None], name: str) -> None:
        self.error: BaseException | None = None
        self._write, self._name, self._pace, self._done = write, name, Pace(), threading.Event()
        try:
            threading.Thread(target=self._run, name=f"fdp {name}").start()
        except RuntimeError:  # the system has no more threads; other ranks may have, and count on this one
            self._run()

    def _run(self) -> None:
        try:
            self._write(self._pace)
        except BaseException as error:  # raised in the thread that waits
            _LOG.error("the %s was not written: %s", self._name, first_line(error))
            self.error = error
        finally:
            del self._write  # it holds a copy of the state
            self._done.set()

    def wait(self) -> None:
        """Wait until it is written, at full speed."""
        self._pace.hurry()
        self._done.wait()  # not `Thread.join`, which takes a thread for ended that it was interrupted in waiting for


class Paced:
    """A file that is written at a limited pace.

    Args:
        stream: the file.
        pace: of the writing.
    """

    def __init__(self, stream: Any, pace: Pace) -> None:
        self._stream, self._pace = stream, pace

    def write(self, data: Any) -> int:
        """Write bytes, in pieces."""
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), _PIECE):
            self._pace.rest()
            self._stream.write(whole[start : start + _PIECE])
        return len(whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
