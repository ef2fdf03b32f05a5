"""What the first call of a signature is doing: lines on a terminal if it takes long, a line a stage in a log."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from fdp.distributed.liveness.threads import start_thread

LOGGER = logging.getLogger("fdp")
"""`LOGGER.setLevel(logging.WARNING)` silences progress, on terminals as well."""

_PATIENCE_S = 2.0
"""A stage that takes longer says so on a terminal."""

_AGAIN_S = 30.0
"""And once more, each time that so much has passed."""


class Progress:
    """Tells a person what a first call is doing, and how long each stage took.

    Rank 0 alone writes to the terminal, if there is one; every rank writes to the log, at level INFO. A terminal gets
    whole lines, and nothing is erased: the step's own code runs in some stages, and may print, or ask in a debugger.

    Args:
        name: the user's function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seconds: dict[str, float] = {}
        self._telling = threading.Lock()

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs.

        Args:
            what: in the progressive form: "tracing".
        """
        LOGGER.info("step %r: %s", self._name, what)
        begun, over = time.perf_counter(), threading.Event()
        if _shows():
            start_thread(functools.partial(self._tell, what, over), "progress")
        try:
            yield
        finally:
            with self._telling:  # nothing is told of a stage that is over
                over.set()
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - begun

    def _tell(self, what: str, over: threading.Event) -> None:
        waited_s = 0.0
        while not over.wait(_AGAIN_S if waited_s else _PATIENCE_S):
            waited_s += _AGAIN_S if waited_s else _PATIENCE_S
            with self._telling:
                if not over.is_set():
                    _print(f"{what} step {self._name!r}, for {waited_s:g} s so far")

    def finish(self) -> None:
        """Say how long each stage took."""
        total_s = sum(self._seconds.values())
        stages = ", ".join(f"{what} {seconds:.1f}" for what, seconds in self._seconds.items())
        text = f"step {self._name!r} is ready after {total_s:.1f} s ({stages})"
        LOGGER.info(text)
        if total_s > _PATIENCE_S and _shows():
            _print(text)


def _shows() -> bool:
    """Whether this process writes to a terminal."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank == 0 and LOGGER.level <= logging.INFO and sys.stderr is not None and sys.stderr.isatty()


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # a terminal that is gone is no reason for a step to fail
        sys.stderr.write(f"fdp: {text}\n")
        sys.stderr.flush()
