"""Whether a process is running, stopped, or gone, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import select


class Process:
    """The state of another process.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.descriptor: int | None = None
        """Becomes readable when the process ends; None where the system has no such thing."""
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)
        state, self._began = self._stat()
        if self.descriptor is None and state in "X?":
            raise OSError("the system does not say which processes there are")

    def is_gone(self) -> bool:
        """Whether it has ended."""
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0)[0])
        state, began = self._stat()
        return state in "ZX" or (began != self._began and state != "?")

    def is_stopped(self) -> bool:
        """Whether a signal, or a debugger, has stopped it."""
        return self._stat()[0] in "Tt"

    def _stat(self) -> tuple[str, str]:
        """Its state, a letter of ps(1), and when it began. X if there is none; ? if the system does not say."""
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as file:
                # The name, in brackets, may hold anything.
                fields = file.read().rpartition(b")")[2].split()
            return fields[0].decode(), fields[19].decode()
        except (FileNotFoundError, ProcessLookupError):
            return "X", ""
        except (OSError, IndexError):
            return "?", ""
