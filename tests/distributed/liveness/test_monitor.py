"""The small process: what it shares with its rank, what it sees of it, and who may connect to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitors import framed, until
from samples import examples

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.addresses import host_name, own_addresses
from fdp.distributed.liveness.links import MonitorLink, listen, start_connecting
from fdp.distributed.liveness.monitor import Monitor
from fdp.distributed.liveness.process import Process
from fdp.distributed.liveness.status import SIZE_BYTES, Status, activity_text


def shared() -> tuple[Any, Status, Status]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the memory lives as long as the test)
    file.truncate(SIZE_BYTES)
    return file, Status(file.fileno()), Status(file.fileno())


@examples(100)
@given(st.text(max_size=900), st.integers(0, 2**63))
def test_what_a_rank_does_is_seen_in_the_other_process(text: str, call: int) -> None:
    file, own, other = shared()
    with file:
        own.say(status_of.CALLING, call, text)
        what, seen_call, seen, age_s = other.doing()
        assert (what, seen_call) == (status_of.CALLING, call)
        cut = text.encode(errors="backslashreplace")[:480].split(b"\0")[0]
        assert seen == cut.decode(errors="replace")
        assert 0 <= age_s < 60


def test_news_are_whole_however_often_they_change() -> None:
    file, own, other = shared()
    with file:
        assert own.news() is None
        ended = threading.Event()

        def tell() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                other.tell(json.dumps({"number": number, "again": [number] * (number % 50)}).encode())

        thread = threading.Thread(target=tell)
        thread.start()
        try:
            for _ in range(300):
                news = own.news()
                assert news is None or news["again"] == [news["number"]] * (news["number"] % 50)
        finally:
            ended.set()
            thread.join()
        before = own.version
        with pytest.raises(ValueError, match="do not fit"):
            other.tell(b" " * SIZE_BYTES)
        assert own.version == before  # the earlier report stays


def test_a_process_is_seen_to_stop_to_go_on_and_to_end() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    seen = Process(sleeper.pid)
    try:
        assert not seen.is_stopped()
        sleeper.send_signal(signal.SIGSTOP)
        assert until(seen.is_stopped)
        assert not seen.is_gone()
        sleeper.send_signal(signal.SIGCONT)
        assert until(lambda: not seen.is_stopped())
    finally:
        sleeper.kill()
    assert until(seen.is_gone)  # before its parent has asked for its exit code, too
    sleeper.wait()
    assert seen.is_gone()


def test_messages_come_whole_whatever_the_pieces_of_the_wire() -> None:
    messages = [{"n": n, "text": "é" * (n * 977)} for n in range(60)]
    with listen(everywhere=False) as listening:
        sending = MonitorLink(start_connecting("127.0.0.1", listening.getsockname()[1]))
        assert until(lambda: bool(select.select([listening], [], [], 0)[0]))
        receiving = MonitorLink(listening.accept()[0])
    for message in messages:
        sending.send(message)
    found: list[Any] = []
    assert until(lambda: (sending.flush(), found.extend(receiving.receive()), len(found) == len(messages))[2])
    assert found == messages
    assert not sending.wants_to_send
    sending.close()
    with pytest.raises(ConnectionResetError):
        until(lambda: bool(list(receiving.receive())))
    receiving.close()


class Running:
    """A monitor of this very process, in a thread."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE_BYTES)
            self.status = Status(file.fileno())
            self.monitor = Monitor(os.getpid(), file.fileno(), self.reading, 1.0, False, "here")
        self.command(do="join", group="g", rank=0, size=3)
        self.thread = threading.Thread(target=self.monitor.run, daemon=True)
        self.thread.start()
        assert until(lambda: self.status.news() is not None)

    def command(self, **command: Any) -> None:
        os.write(self.writing, json.dumps(command).encode() + b"\n")

    def story(self) -> list[dict[str, Any]]:
        return self.status.news()["g"]["story"]  # type: ignore[no-any-return]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.monitor.port), timeout=5)

    def hello(self, **changes: Any) -> bytes:
        told = {"group": "g", "rank": 1, "token": self.monitor.token, "host": "there", "received": 0}
        told |= {"liveness_s": 1.0, **changes}
        return framed(told)


@pytest.fixture(scope="module")
def running() -> Running:
    return Running()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        framed([]),
        framed({}),
        framed({"group": "another", "rank": 1, "token": "", "host": ""}),
        struct.pack(">I", 3) + b"{{{",
        struct.pack(">I", 200_000) + b"[" * 200_000,
        struct.pack(">I", 4000) + b"[" * 4000,
    ],
)
def test_strangers_are_turned_away(running: Running, said: bytes) -> None:
    with running.connect() as stranger, contextlib.suppress(ConnectionError):  # it may be closed before all is said
        stranger.sendall(said)
        assert stranger.recv(100) == b""
    assert running.story() == []
    assert running.thread.is_alive()


@pytest.mark.parametrize(
    "changes",
    [
        {"token": "guessed"}, {"rank": 0}, {"rank": 3}, {"rank": -1}, {"rank": "x"}, {"rank": float("inf")},
        {"liveness_s": 0}, {"liveness_s": float("nan")}, {"liveness_s": "soon"},
    ],
)  # fmt: skip
def test_who_does_not_know_the_token_or_is_no_child_is_turned_away(running: Running, changes: dict[str, Any]) -> None:
    with running.connect() as stranger:
        stranger.sendall(running.hello(**changes))
        assert stranger.recv(100) == b""
    assert running.story() == []


def test_a_child_is_heard_and_missed_when_it_is_gone(running: Running) -> None:
    with running.connect() as child:
        hello = running.hello()
        child.sendall(hello[:7])  # in two pieces
        time.sleep(0.05)
        child.sendall(hello[7:] + framed({"report": _fault(2, "raised", "ValueError: no"), "number": 1, "received": 0}))
        assert until(lambda: [each["rank"] for each in running.story()] == [2])
        running.command(do="raised", group="g", text="KeyError: 'w'", call=7, attempt=1)
        assert until(lambda: [each["rank"] for each in running.story()] == [2, 0])
        running.command(do="clear", group="g")
        assert until(lambda: [each["rank"] for each in running.story()] == [2])
    assert until(lambda: [each["rank"] for each in running.story()] == [2, 1])
    assert running.story()[1]["suspected"]
    assert running.story()[1]["reason"] == "unreachable"  # its monitor has not said where it is


def test_many_strangers_keep_no_monitor_out(running: Running) -> None:
    silent = [running.connect() for _ in range(100)]
    try:
        with running.connect() as child:
            child.sendall(running.hello(rank=2))
            assert b"here" in child.recv(100)
    finally:
        for stranger in silent:
            stranger.close()
    assert until(lambda: 2 in [each["rank"] for each in running.story()])


def test_a_group_that_the_rank_has_left_is_not_told_of_any_more(running: Running) -> None:
    running.command(do="join", group="another", rank=0, size=1)  # no other rank has to hear of it
    assert until(lambda: "another" in running.status.news())
    running.command(do="leave", group="another", reason="left", text="", calls={}, because={})
    assert until(lambda: "another" not in running.status.news())
    assert until(lambda: "another" not in running.monitor._groups)
    assert "g" in running.status.news()


def test_a_process_of_which_the_system_does_not_tell_has_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    seen = Process(sleeper.pid)
    monkeypatch.setattr("builtins.open", fails)
    assert not seen.is_gone()
    seen.descriptor = None
    assert not seen.is_gone()
    assert not seen.is_stopped()
    monkeypatch.setattr(os, "pidfd_open", fails)
    with pytest.raises(OSError, match="does not say"):
        Process(sleeper.pid)
    monkeypatch.undo()
    sleeper.kill()
    sleeper.wait()
    assert seen.is_gone()


def _fault(rank: int, reason: str, text: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "reason": reason,
        "text": text,
        "call": None,
        "suspected": False,
        "after_s": 0.0,
        "calls": 0,
        "because": [],
        "attempt": 1,
    }


def test_this_machine_has_a_name_and_addresses_that_are_not_its_own_loopback() -> None:
    assert host_name() == host_name() != ""
    assert not any(address.startswith("127.") or address == "::1" for address in own_addresses())


def test_what_a_rank_does_reads_as_a_sentence() -> None:
    assert activity_text(status_of.NEW, 0, "") == "in its own code, before the first call of a step"
    assert activity_text(status_of.PREPARING, 1, "train") == "preparing call 1 of step 'train'"
    assert activity_text(status_of.WAITING, 3, "it's") == 'in call 3 of step "it\'s"'
