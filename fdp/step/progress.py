"""What the first call of a signature is doing: one line on a terminal, a line a stage in a log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from fdp.distributed.liveness.threads import start_thread
from fdp.step.live_line import LINE
from fdp.tables import short_name

LOGGER = logging.getLogger("fdp")
"""`LOGGER.setLevel(logging.WARNING)` silences progress, on terminals as well."""

_REDRAWN_S = 0.2
"""How often the line on a terminal is drawn anew."""

_AGAIN_S = 30.0
"""A stage says so once more in the log, each time that so much has passed."""


class Progress:
    """Tells a person what a first call is doing, and how long each stage took; a context manager.

    Rank 0 alone writes to the terminal, if there is one; every rank writes to the log, at level INFO.

    Args:
        name: the user's function.
    """

    def __init__(self, name: str) -> None:
        self._name = short_name(name)
        self._seconds: dict[str, float] = {}
        self._stages: list[_Stage] = []
        self._over = threading.Event()
        self._failed = ""
        self._on_terminal = self._as_line = False

    def __enter__(self) -> Progress:
        self._over.clear()
        self._on_terminal = _may_show()
        self._as_line = self._on_terminal and LINE.add(self._text)
        if self._on_terminal or LOGGER.isEnabledFor(logging.INFO):
            start_thread(self._keep_telling, "progress")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self._on_terminal:
            LINE.remove(self._text)
        if error is not None and self._failed:
            LOGGER.info("step %r: %s while %s", self._name, type(error).__name__, self._failed)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs; a stage in another one is not part of its seconds.

        Args:
            what: in the progressive form: "tracing".
        """
        stage = _Stage(what)
        self._tell(f"step {self._name!r}: {what}")
        for outer in self._stages[-1:]:
            outer.pause()
        self._stages.append(stage)
        if self._as_line:
            LINE.draw()
        try:
            yield
        except BaseException:
            self._failed = self._failed or f"{what}, after {stage.seconds:.1f} s"
            raise
        finally:
            self._stages.remove(stage)
            self._seconds[what] = self._seconds.get(what, 0.0) + stage.seconds
            for outer in self._stages[-1:]:
                outer.go_on()

    def finish(self) -> None:
        """Show how long each stage took."""
        text = f"step {self._name!r} is ready after {sum(self._seconds.values()):.1f} s ({self._past()})"
        LOGGER.info(text)
        if self._on_terminal:
            LINE.print(f"fdp: {text}")

    def _past(self) -> str:
        return ", ".join(f"{what} {seconds:.1f}" for what, seconds in self._seconds.items())

    def _text(self) -> str:
        """The line of a terminal."""
        stage = next(iter(self._stages[-1:]), None)
        now = f"{stage.what}, {stage.seconds:.0f} s" if stage is not None else "..."
        return f"fdp: step {self._name!r}: {now}" + (f" (after {self._past()})" if self._seconds else "")

    def _tell(self, text: str) -> None:
        LOGGER.info(text)
        if self._on_terminal and not self._as_line:
            LINE.print(f"fdp: {text}")

    def _keep_telling(self) -> None:
        told: tuple[_Stage | None, float] = (None, 0.0)
        while not self._over.wait(_REDRAWN_S):
            if self._as_line:
                LINE.draw()
            stage = next(iter(self._stages[-1:]), None)
            if stage is None:
                continue
            if told[0] is not stage:
                told = (stage, 0.0)
            if stage.seconds >= told[1] + _AGAIN_S:
                told = (stage, stage.seconds)
                self._tell(f"step {self._name!r}: {stage.what}, for {stage.seconds:.0f} s so far")


class _Stage:
    """A stage, and the seconds that it takes without those in it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._before_s, self._since = 0.0, time.perf_counter()
        self._goes_on = True

    @property
    def seconds(self) -> float:
        return self._before_s + (time.perf_counter() - self._since if self._goes_on else 0.0)

    def pause(self) -> None:
        self._before_s, self._goes_on = self.seconds, False

    def go_on(self) -> None:
        self._since, self._goes_on = time.perf_counter(), True


def _may_show() -> bool:
    """Whether this process is the one that writes to a terminal, where stderr is one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank == 0 and LOGGER.level <= logging.INFO
