"""A rank's program in a process that has torch imported already: importing it takes most of the time of a short one.

What this leaves out is how Python ends: neither `sys.excepthook` nor `atexit` is called.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence

import ranks
import torch
from torchrun import ROOT


class Forked:
    """A program that runs, with those methods of `subprocess.Popen` that tests call.

    Args:
        script: what it runs, in the script's own folder.
        arguments: of the script.
        variables: of the environment, beside this process's.
    """

    def __init__(self, script: pathlib.Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.args = [str(script), *arguments]
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="fdp-program-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        given = (self.args, dict(variables), self._folder)
        self._process = ranks.context().Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it printed, and what it said of errors.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._text("out"), self._text("err")

    def _text(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(errors="replace") if path.exists() else ""


def _run(args: list[str], variables: dict[str, str], folder: pathlib.Path) -> None:
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(variables)
    torch.set_num_threads(1)
    own = os.path.dirname(args[0])
    os.chdir(own)
    sys.path[:0] = [own, str(ROOT)]
    sys.argv = args
    runpy.run_path(args[0], run_name="__main__")
