"""The line on a terminal gives way: to what the user's code prints, to prompts, and to debuggers."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from typing import Any

import pytest
from terminals import Terminal, at_a_terminal, on_a_terminal

from fdp.step.live_line import LINE, LiveLine

GONE = "\x1b[4D\x1b[0K"  # back over "line", and nothing is there


def text() -> str:
    return "line"


def test_the_line_is_taken_away_for_what_is_printed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    line = LiveLine()
    assert line.add(text)
    line.draw()
    print("printed")
    line.draw()
    line.draw()  # nothing has changed
    line.remove(text)
    assert terminal.getvalue() == f"line{GONE}printed\nline{GONE}"
    assert "write" not in vars(terminal), "the stream is as it was"


def test_it_does_not_come_back_behind_a_line_that_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    line = LiveLine()
    line.add(text)
    line.draw()
    print("how far? ", end="")
    line.draw()
    assert terminal.getvalue() == f"line{GONE}how far? "
    print("there")
    line.draw()
    line.remove(text)
    assert terminal.getvalue() == f"line{GONE}how far? there\nline{GONE}"


def test_a_handler_of_a_log_that_holds_the_stream_is_given_way_to(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    handler = logging.StreamHandler(terminal)
    line = LiveLine()
    line.add(text)
    line.draw()
    handler.emit(logging.makeLogRecord({"msg": "logged"}))
    line.remove(text)
    assert terminal.getvalue() == f"line{GONE}logged\n"


def test_what_was_added_last_is_shown_and_then_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    line = LiveLine()
    other = "rows".__str__
    line.add(text)
    line.add(other)
    line.draw()
    line.remove(other)
    line.draw()
    line.remove(text)
    assert terminal.getvalue() == f"rows{GONE}line{GONE}"


def test_a_line_is_cut_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch, columns=40)
    line = LiveLine()
    long = ("word " * 20).__str__
    line.add(long)
    line.draw()
    assert len(terminal.getvalue()) == 39 and terminal.getvalue().endswith("…")
    line.remove(long)


@pytest.mark.parametrize("why", ["the terminal is dumb", "the stream has no attributes"])
def test_where_nothing_can_be_taken_away_there_are_whole_lines(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out: io.TextIOBase = Terminal()
    if why == "the terminal is dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:

        class Slots:
            __slots__ = ("to",)

            def __init__(self) -> None:
                self.to = Terminal()

            def isatty(self) -> bool:
                return True

            def write(self, text: str) -> int:
                return self.to.write(text)

            def flush(self) -> None:
                pass

            def getvalue(self) -> str:
                return self.to.getvalue()

        out = Slots()  # type: ignore[assignment]
    monkeypatch.setattr(sys, "stderr", out)
    line = LiveLine()
    assert not line.add(text)
    line.draw()
    line.print("whole")
    line.remove(text)
    assert out.getvalue() == "whole\n"  # type: ignore[attr-defined]


def test_a_child_by_fork_prints_though_another_thread_was_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    LINE.add(text)
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with LINE._lock:
            holds.set()
            ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(60)
    child = os.fork()
    if child == 0:  # would wait for the lock for ever
        print("from the child")
        os._exit(0 if terminal.getvalue().endswith("from the child\n") else 1)
    end_s = time.monotonic() + 30
    status = (0, 0)
    while status[0] == 0 and time.monotonic() < end_s:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    ends.set()
    thread.join()
    LINE.remove(text)
    if status[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == (child, 0)


def test_the_line_waits_for_a_debugger_to_end_and_then_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    line = LiveLine()
    line.add(text)

    def draw() -> str:
        line.draw()
        return terminal.getvalue()

    debugger: dict[str, Any] = {"__name__": "bdb", "draw": draw}
    exec("def interact():\n    print('(Pdb)')\n    return draw()", debugger)
    assert debugger["interact"]() == "(Pdb)\n"
    assert line._debugger is not None
    line.remove(text)
    assert line._debugger is None, "its frame has the user's variables"
    line.add(text)
    debugger["interact"]()
    line.draw()
    line.remove(text)
    assert terminal.getvalue() == f"(Pdb)\n(Pdb)\nline{GONE}"


PROGRAM = """
import time, torch, fdp
def step(w, x):
    if not stopped:
        stopped.append(True)
        breakpoint()
    return w * fdp.pmean(x.sum())
stopped = []
print("begun: ", end="", flush=True)
fdp.data_parallel(step)(torch.ones(2), torch.ones(2))
print("ended")
"""


def test_a_debugger_has_the_terminal_for_itself() -> None:
    seen = on_a_terminal(PROGRAM, [(b"(Pdb) ", b"p 20 + 3\n"), (b"23\r\n(Pdb) ", b"c\n")])
    before, _, rest = seen.partition("> <string>(7)step()")
    assert before.startswith("begun: fdp: step 'step': tracing, 0 s") and before.endswith("\x1b[0K")
    asking, _, after = rest.rpartition("(Pdb) c\n")
    assert "(Pdb) p 20 + 3\n23\n" in asking and "fdp:" not in asking and "\x1b[" not in asking
    assert "fdp: step 'step': planning, 0 s" in after and "fdp: step 'step' is ready after" in after
    assert after.endswith("ended\n")
