"""One line at the end of a terminal that is drawn again and again, and gives way to whatever else is written there.

The user's code runs while it is there, and may print, or stop in a debugger. So the streams of the process take the
line away before they write. It comes back when what was written ends a line, and no debugger waits for its user.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

import rich.console
import rich.control
import rich.segment
import rich.text

from fdp.runtime.frames import has_ended

_DEBUGGERS = frozenset({"bdb", "code"})
"""Modules that are on the stack of a thread in pdb, ipdb and the like, or in `code.interact`."""

_OWN = "fdp.step."
"""The modules that call the user's code: a debugger below them has not been called by it."""


class LiveLine:
    """The line of this process; what is shown is what the last that was added says.

    All methods may be called by any thread, and do nothing where stderr is no terminal. A terminal that cannot go back
    in a line ("dumb"), or a stream whose `write` cannot be replaced, gets whole lines alone.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Show nothing, as at the beginning."""
        self._lock = threading.RLock()
        self._shown: list[tuple[Callable[[], str], int]] = []
        self._undo: list[Callable[[], None]] = []
        self._write: Callable[[str], object] | None = None  # writes to the terminal, past what gives way
        self._drawn = rich.text.Text()  # what is there
        self._waits = False  # whether the last that was written did not end its line
        self._debugger: FrameType | None = None  # the last one that wrote

    def add(self, text: Callable[[], str]) -> bool:
        """Show what a function says, until it is removed.

        Args:
            text: is asked at each drawing. The thread that adds it is the one that a debugger may stop.

        Returns:
            Whether there is a line; else whole lines are all that can be shown.
        """
        with self._lock:
            if not self._shown:
                self._begin()
            self._shown.append((text, threading.get_ident()))
            return self._write is not None

    def remove(self, text: Callable[[], str]) -> None:
        """Show it no longer."""
        with self._lock:
            self._shown = [each for each in self._shown if each[0] != text]
            self._erase()
            if not self._shown:
                self._end()

    def draw(self) -> None:
        """Draw the line anew, with what is to be said by now."""
        with self._lock:
            self._draw()

    def print(self, text: str) -> None:
        """Write something that stays, in whole lines."""
        with self._lock:
            self._erase()
            terminal = _terminal()
            if terminal is not None:
                console = _console()
                lines = rich.text.Text(text).wrap(console, console.width)
                _quietly(terminal.write, "".join(f"{line.plain.rstrip()}\n" for line in lines))
                _quietly(terminal.flush)

    def _begin(self) -> None:
        """From now on the streams make way."""
        self._drawn, self._waits, self._write = rich.text.Text(), False, None
        terminal = _terminal()
        if terminal is None or _console().is_dumb_terminal:
            return
        write = terminal.write
        try:
            for stream in {id(stream): stream for stream in (sys.stdout, terminal) if _is_terminal(stream)}.values():
                self._undo.append(self._make_way_for(stream))
        except TypeError:  # it has no attributes of its own
            self._end()
        else:
            self._write = write

    def _end(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._write = self._debugger = None  # whose frame has the user's variables

    def _make_way_for(self, stream: TextIO) -> Callable[[], None]:
        """Let a stream take the line away before it writes; returns what undoes that.

        The stream stays the object that it is: whoever holds it, as handlers of logs do, is seen as well.
        """
        before, write = vars(stream).get("write"), stream.write

        def make_way(text: str) -> int:
            if not self._shown:
                return write(text)
            with self._lock:
                self._erase()
                if self._shown and self._shown[-1][1] == threading.get_ident():
                    self._debugger = _debugger_of(sys._getframe(1))
                if text:
                    self._waits = not text.endswith("\n")
                return write(text)

        def undo() -> None:
            if vars(stream).get("write") is make_way:
                if before is None:
                    del vars(stream)["write"]
                else:
                    vars(stream)["write"] = before

        vars(stream)["write"] = make_way
        return undo

    def _draw(self) -> None:
        terminal = _terminal()
        if not self._shown or terminal is None or self._write is None or self._waits:
            return
        if self._debugger is not None and not has_ended(self._debugger):
            return
        self._debugger = None
        text, _ = self._shown[-1]
        line = rich.text.Text(text())
        line.truncate(_console().width - 1, overflow="ellipsis")
        if line != self._drawn:
            self._erase()
            _quietly(self._write, line.plain)
            _quietly(terminal.flush)
            self._drawn = line

    def _erase(self) -> None:
        """Go back over the line: to where it began, as there may be something before it that was not ended."""
        if self._drawn and self._write is not None:
            back = (rich.segment.ControlType.CURSOR_BACKWARD, self._drawn.cell_len)
            _quietly(self._write, str(rich.control.Control(back, (rich.segment.ControlType.ERASE_IN_LINE, 0))))
        self._drawn = rich.text.Text()


def _terminal() -> TextIO | None:
    return sys.stderr if _is_terminal(sys.stderr) else None


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):  # it is closed, or no stream
        return False


def _console() -> rich.console.Console:
    """What knows how wide the terminal is, and what it can."""
    return rich.console.Console(file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)


def _quietly(call: Callable[..., object], *args: Any) -> None:
    """A terminal that is gone is no reason for a step to fail."""
    with suppress(OSError, ValueError):
        call(*args)


def _debugger_of(frame: FrameType | None) -> FrameType | None:
    """Where a debugger runs that the user's code has called and that talks to its user, if one does.

    Args:
        frame: where something is written.
    """
    found = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_OWN):
            break
        if module in _DEBUGGERS:
            found = frame
        frame = frame.f_back
    return found


LINE = LiveLine()

# A process that is forked meanwhile has the streams, and not the thread that draws; another thread may hold the lock.
os.register_at_fork(after_in_child=LINE.forget)
