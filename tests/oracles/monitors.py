"""Monitors of processes that sleep, in threads of this one; their connections can go by way of one that resets them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fdp.distributed.liveness.monitor import Monitor
from fdp.distributed.liveness.status import SIZE_BYTES, Status


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until something is true; whether it is."""
    end_s = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def framed(message: Any) -> bytes:
    """A message as it goes over a connection between monitors."""
    text = json.dumps(message).encode()
    return struct.pack(">I", len(text)) + text


class Watching:
    """The monitor of a process that sleeps.

    Args:
        rank: of the process in group "g".
        size: of the group.
        liveness_s: seconds after which a silent one counts as lost.
        host: what the monitor takes for the name of its machine.
    """

    def __init__(self, rank: int, size: int, liveness_s: float = 4.0, host: str = "here") -> None:
        self.rank, self.host = rank, host
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        self.reading, self.writing = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE_BYTES)
            self.status = Status(file.fileno())
            self.monitor = Monitor(self.process.pid, file.fileno(), self.reading, liveness_s, False, host)
        self.command(do="join", group="g", rank=rank, size=size)
        self.thread = threading.Thread(target=self.monitor.run, daemon=True)
        self.thread.start()

    def command(self, **command: Any) -> None:
        """Tell the monitor something."""
        os.write(self.writing, json.dumps(command).encode() + b"\n")

    def meets(self, other: Watching, port: int = 0) -> None:
        """Tell the monitor where another one is, or what leads to it."""
        self.command(
            do="neighbour", group="g", rank=other.rank, addresses=["127.0.0.1"], port=port or other.monitor.port,
            token=other.monitor.token, host=other.host,
        )  # fmt: skip

    def news(self) -> dict[str, Any]:
        """The report of the monitor to its rank."""
        return (self.status.news() or {}).get("g", {"story": [], "busy": [], "unreached": []})  # type: ignore[no-any-return]

    def faults(self) -> list[tuple[int, str, bool]]:
        """What became of other ranks: which, why, and whether that is only suspected."""
        return [(each["rank"], each["reason"], each["suspected"]) for each in self.news()["story"]]

    def links(self) -> dict[int, int]:
        """To which ranks there are connections, from which ports."""
        neighbours = self.monitor._groups["g"].neighbours if "g" in self.monitor._groups else {}
        found = {}
        for rank, neighbour in neighbours.items():
            with contextlib.suppress(OSError, AttributeError):
                found[rank] = neighbour.link.socket.getsockname()[1] + neighbour.link.socket.getpeername()[1]
        return found

    def vanish(self) -> None:
        """End the monitor without a word, as if it was killed: the system closes its end of all connections."""
        self.monitor._is_done = lambda now_s: True  # type: ignore[method-assign]
        self.monitor._report = lambda reason: None  # type: ignore[method-assign]
        self.monitor._connections.say_goodbye = lambda group: None  # type: ignore[method-assign]
        self.process.kill()
        self.process.wait()
        self.thread.join(10)
        for key in list(self.monitor._selector.get_map().values()):
            if not isinstance(key.fileobj, int):
                key.fileobj.close()  # type: ignore[union-attr]
        self.monitor._selector.close()

    def end(self) -> None:
        """End the process, and the monitor."""
        if self.monitor._selector.get_map() is not None:
            self.vanish()
        os.close(self.reading)
        os.close(self.writing)
        if self.monitor._process.descriptor is not None:
            os.close(self.monitor._process.descriptor)


@contextlib.contextmanager
def watching(size: int, **options: Any) -> Iterator[list[Watching]]:
    """As many monitors as ranks, which do not know of each other yet."""
    all_of_them = [Watching(rank, size, **options) for rank in range(size)]
    try:
        yield all_of_them
    finally:
        for each in all_of_them:
            each.end()


class Wire:
    """What connections to a port go through, each by way of this process.

    Attributes:
        port: where it takes connections.
        is_closed: whether new connections are never answered.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.is_closed = False
        self._ends: list[socket.socket] = []
        self._swallowed: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)
        self._listening.close()
        self.reset()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listening.accept()
                self._ends.append(one)
                if self.is_closed:
                    continue
                other = socket.create_connection(("127.0.0.1", self._to))
                self._ends.append(other)
                for pair in ((one, other), (other, one)):
                    self._threads.append(threading.Thread(target=self._forward, args=pair, daemon=True))
                    self._threads[-1].start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while found := one.recv(2**16):
                if one not in self._swallowed:
                    other.sendall(found)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Lose all that comes over the connections that there are, from now on, and leave them open."""
        self._swallowed.update(self._ends)

    def reset(self) -> None:
        """Reset all connections, on both sides; what is under way is lost."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # A thread that reads keeps the connection open beyond close().
                end.shutdown(socket.SHUT_RD)
            end.close()
