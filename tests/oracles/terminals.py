"""Terminals: one that remembers what is written to it, and a real one that a program runs on."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time

import pytest


class Terminal(io.StringIO):
    """What a person sees: what is written to stdout and to stderr."""

    def isatty(self) -> bool:
        return True

    def written(self) -> str:
        """All but what is taken away again."""
        return re.sub(r"fdp: [^\n]*?\x1b\[\d+D\x1b\[0K", "", self.getvalue())


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> Terminal:
    """From here on; to be called in the test itself, as pytest puts its own streams in place before each."""
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return out


def on_a_terminal(program: str, answers: list[tuple[bytes, bytes]], columns: int = 80) -> str:
    """What a program writes to a terminal where a person answers what it asks.

    Args:
        program: its text.
        answers: what a person waits for, and then types.
        columns: of the terminal.

    Returns:
        All of it, also what is taken away again.
    """
    child, master = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS=str(columns))
        os.execv(sys.executable, [sys.executable, "-c", program])
    written, asked = b"", list(answers)
    while select.select([master], [], [], 120)[0]:
        try:
            got = os.read(master, 1 << 16)
        except OSError:  # it has ended
            break
        if not got:
            break
        written += got
        if asked and asked[0][0] in written:
            time.sleep(0.6)  # for a line to be drawn, were it to be
            os.write(master, asked.pop(0)[1])
    os.waitpid(child, 0)
    os.close(master)
    return written.decode().replace("\r\n", "\n")
