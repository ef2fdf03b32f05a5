"""The rank's side of its monitor: starts the process, and sends it commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.addresses import host_name
from fdp.distributed.liveness.status import SIZE_BYTES, Status

_START_S = 20.0
"""So long a monitor may take to start; without it there is a warning, and no ranks are watched."""

_BOOTSTRAP = (
    # As a package without its __init__, which imports torch.
    "import sys, types; fdp = types.ModuleType('fdp'); fdp.__path__ = [sys.argv.pop(1)]; sys.modules['fdp'] = fdp; "
    "from fdp.distributed.liveness.monitor import main; main()"
)


class OwnMonitor:
    """The monitor of this process."""

    def __init__(self, liveness_s: float, everywhere: bool) -> None:
        self.pid, self._lock = os.getpid(), threading.Lock()
        self.closing = threading.Event()
        self.uncaught: BaseException | None = None
        with _memory() as memory:
            memory.truncate(SIZE_BYTES)
            self.status = Status(memory.fileno())
            self.status.say(status_of.NEW, 0, "")
            reading, self._writing = os.pipe()
            try:
                arguments = [self.pid, memory.fileno(), reading, liveness_s, int(everywhere), host_name()]
                self.port, self.token = _start(memory.fileno(), reading, [str(argument) for argument in arguments])
            except BaseException:
                os.close(self._writing)
                raise
            finally:
                os.close(reading)
        os.set_blocking(self._writing, False)

    def command(self, **command: Any) -> None:
        """Send the monitor a command; it is lost if the monitor has ended."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._writing, json.dumps(command).encode() + b"\n")


def _memory() -> IO[bytes]:
    """A file in memory, if the system has such files."""
    try:
        return os.fdopen(os.memfd_create("fdp"), "r+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _start(memory: int, reading: int, arguments: list[str]) -> tuple[int, str]:
    package = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, package, *arguments]
    # Not by fork: no other descriptor goes along, or connections of this process would outlive it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(memory, reading)
    ) as process:
        try:
            said, errors = process.communicate(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    if process.returncode:
        raise OSError(errors.decode(errors="replace").strip().splitlines()[-1:] or "it said nothing")
    found = json.loads(said)
    return int(found["port"]), str(found["token"])
