"""Connections between monitors are reset while ranks train and wait: no rank is called dead, and later deaths are."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import pytest
from forked import Forked
from programs import end_ranks, printed_events, start_ranks

PROGRAM = pathlib.Path(__file__).with_name("program.py")


def why_not() -> str | None:
    """What is missing to reset connections of other processes here; None if nothing is."""
    if os.geteuid() != 0 or shutil.which("ss") is None:
        return "needs root, and the command ss, of iproute2"
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as one,
        listening.accept()[0],
    ):
        _reset(*one.getsockname()[1:], listening.getsockname()[1])
        try:
            one.send(b"x")
        except OSError:
            return None
    return "this system does not let connections be reset (CONFIG_INET_DIAG_DESTROY)"


def _reset(own: int, other: int) -> None:
    command = ["ss", "-K", "-tnH", "sport", "=", f":{own}", "dport", "=", f":{other}"]
    subprocess.run(command, check=True, capture_output=True)


def reset_all(monitors: list[int]) -> int:
    """Reset all connections of some processes; how many there were."""
    lines = subprocess.run(["ss", "-tnpH"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line.split() for line in lines if any(f"pid={monitor}," in line for monitor in monitors)]
    for _, _, _, own, other, *_ in found:
        _reset(int(own.rpartition(":")[2]), int(other.rpartition(":")[2]))
    return len(found)


def monitors_of(started: Sequence[subprocess.Popen[str] | Forked]) -> list[int]:
    """The process ids of the monitors of some ranks."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any("liveness.monitor" in word for word in words) and {str(rank.pid) for rank in started} & set(words):
            found.append(int(path.parent.name))
    return found


def test_ranks_go_on_and_a_later_death_is_named(tmp_path: pathlib.Path) -> None:
    if (why := why_not()) is not None:
        pytest.skip(why)
    # Rank 1 sleeps for twelve seconds; the others wait for it, and would believe what is suspected.
    started = start_ranks(PROGRAM, ["asleep", "1", str(tmp_path)], 3, forked=range(3), FDP_LIVENESS_S="3")
    try:
        end_s = time.monotonic() + 180
        while len(printed_events(tmp_path)) < 3 and time.monotonic() < end_s:
            time.sleep(0.1)
        monitors = monitors_of(started)
        assert len(monitors) == 3
        resets = 0
        for _ in range(8):
            time.sleep(1.0)
            resets += reset_all(monitors) > 0
        assert resets >= 6
        time.sleep(6.0)
        assert [line["event"] for line in printed_events(tmp_path) if line["event"] == "error"] == [], printed_events(
            tmp_path
        )
        reset_all(monitors)
        killed_s = time.time()
        started[2].send_signal(signal.SIGKILL)
    finally:
        printed = "\n".join(end_ranks(started, 30))
    errors = {line["rank"]: line for line in printed_events(tmp_path) if line["event"] == "error"}
    assert sorted(errors) == [0, 1], printed
    for error in errors.values():
        assert (error["ranks"], error["reason"]) == ([2], "died"), error
        assert error["when_s"] - killed_s < 10, error
