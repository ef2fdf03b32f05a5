"""What the first call of a signature is doing: one line on a terminal, a line a stage in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import Progress as Live
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from fdp.distributed.group import Group

LOGGER = logging.getLogger("fdp")
"""`LOGGER.setLevel(logging.WARNING)` silences progress, on terminals as well."""


class Progress:
    """Tells a person what a first call is doing, and how long each stage took.

    Rank 0 alone writes to the terminal, if there is one; every rank writes to the log, at level INFO.

    Args:
        name: the user's function.
        group: the ranks.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._name, self._rank = name, group.rank
        self._stages: list[tuple[str, float]] = []
        self._live: Live | None = None
        self._line: Any = None

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show what follows; at the end, say how long it took."""
        console = Console(stderr=True)
        shows = self._rank == 0 and console.is_terminal and LOGGER.level <= logging.INFO
        with self._on(console) if shows else nullcontext():
            yield self
        if self._stages:
            text = self.summary()
            LOGGER.info(text)
            if shows:
                console.print(f"fdp: {text}", highlight=False, markup=False)

    def _on(self, console: Console) -> AbstractContextManager[Any]:
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        # What the step prints meanwhile stays where it is printed to.
        live = Live(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live, self._line = live, live.add_task("")
        return live

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say what is being done while the block runs.

        Args:
            what: in the progressive form: "tracing".
        """
        LOGGER.info("step %r: %s", self._name, what)
        if self._live is not None:
            self._live.update(self._line, description=f"fdp: {what} step {self._name!r}")
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._stages.append((what, time.perf_counter() - begun))

    def summary(self) -> str:
        """How long each stage took, in one line."""
        seconds: dict[str, float] = {}
        for what, took in self._stages:
            seconds[what] = seconds.get(what, 0.0) + took
        stages = ", ".join(f"{what} {took:.1f}" for what, took in seconds.items())
        return f"step {self._name!r} is ready after {sum(seconds.values()):.1f} s ({stages})"
