"""Prints where a rank is, on a signal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from fdp.distributed.liveness.watch import all_watched
from fdp.distributed.liveness.watched import age, described_status


def where() -> str:
    """Lines of text: what this rank does, and what it knows of the others, for each group."""
    lines = []
    for watched in all_watched():
        lines.append(f"fdp: rank {watched.rank} of {watched.size} is {described_status(watched)}.")
        if watched.awaited is not None and watched.waits_since_s is not None:
            waited = age(time.monotonic() - watched.waits_since_s)
            lines.append(f"  it has waited for {waited} for {watched.awaited()}")
        lines += [
            f"  rank {rank} is not waiting: for {age(age_s)} {text}"
            for rank, text, age_s in watched.busy()
            if rank != watched.rank
        ]
        lines += [f"  rank {fault.rank} {fault.reason}: {fault.text}" for fault in watched.faults(believing=True)]
    return "\n".join(lines) or "fdp: no ranks are watched."


def report_on_signal() -> bool:
    """Have `where()` printed on SIGUSR1, unless the program, or a library, does something on it already.

    Returns:
        Whether it will be.
    """
    if threading.current_thread() is not threading.main_thread() or _is_caught(signal.SIGUSR1):
        return False
    signal.signal(signal.SIGUSR1, _report)
    return True


def _report(number: int, frame: FrameType | None) -> None:
    text = f"{where()}\n"
    try:
        # Not by way of the stream, which may be in the middle of something.
        os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))
    except (OSError, ValueError):  # it is no file, as in a notebook
        with contextlib.suppress(Exception):
            sys.stderr.write(text)


def _is_caught(number: signal.Signals) -> bool:
    """Whether the process does something on a signal; also one that was set up by C code, as faulthandler does."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return True
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/self/status").read_text()
        caught = int(re.search(r"^SigCgt:\s*(\w+)", text, re.MULTILINE).group(1), 16)  # type: ignore[union-attr]
        return bool(caught >> (number - 1) & 1)
    return True  # not known: it is left alone
