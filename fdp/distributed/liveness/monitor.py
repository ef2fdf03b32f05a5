"""The small process beside a rank: watches it, and talks to the monitors of other ranks.

It is a process, and no thread, so that nothing that the rank does can stop it: a long first call, an operator that
keeps Python's lock, or a signal that stops the rank. It imports neither torch nor the rest of fdp.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.links import LONGEST, Link, listen, start_connecting
from fdp.distributed.liveness.process import Process
from fdp.distributed.liveness.status import Status, described
from fdp.distributed.liveness.tree import Node, parent_of

_LINGERS_S = 15.0
"""So long a monitor stays, at most, when its rank has gone: others may still have to hear why."""

_LOOKS_FOR_PARENT_S = 120.0
"""So long it stays, at most, if it has something to say and its parent was never there."""

_FAREWELL_S = 1.0
"""So long it stays at least, so that what it said last is read."""

_STRANGERS = 64
"""So many may be connected at once that have not said who they are; the oldest goes."""

_LONGEST_HELLO = 4096

_CONNECTS_S = 3.0
"""So long it waits for a connection to one address."""


@dataclass
class _Group:
    """A group of ranks that this one belongs to.

    Attributes:
        node: this monitor among those of the group.
        links: connections to neighbours, by rank.
        routes: where the parent may be reached: addresses and ports to try; none left while a connection is there.
        token: what the parent wants to hear.
        attempt: the connection that is being made, and until when.
        next_attempt_s: when the next one is due.
        sought_since_s: since when the parent's address is known.
        linked: whether there ever was a connection.
        left_s: since when the rank is no longer in the group; None if it is.
    """

    node: Node
    links: dict[int, Link] = field(default_factory=dict)
    addresses: list[tuple[str, int]] = field(default_factory=list)
    routes: list[tuple[str, int]] = field(default_factory=list)
    token: str = ""
    attempt: tuple[Link, float] | None = None
    next_attempt_s: float = 0.0
    sought_since_s: float = 0.0
    linked: bool = False
    left_s: float | None = None


class Monitor:
    """Watches one process.

    Args:
        pid: of the process.
        memory: a file of `status.SIZE_BYTES` that it has mapped as well.
        commands: where its commands come from, a line each.
        liveness_s: seconds after which a rank that is silent, or stopped, counts as lost.
        everywhere: whether other machines may connect.
        host: what names this machine.
    """

    def __init__(self, pid: int, memory: int, commands: int, liveness_s: float, everywhere: bool, host: str) -> None:
        self._process, self._status = Process(pid), Status(memory)
        self._commands, self._unread = commands, b""
        self._liveness_s, self._host = liveness_s, host
        self._listening = listen(everywhere)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._groups: dict[str, _Group] = {}
        self._strangers: dict[Link, float] = {}
        self._stopped_s: float | None = None
        self._gone_s: float | None = None
        self._left: Fault | None = None
        self._told: Any = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(commands, selectors.EVENT_READ, self._obey)
        if self._process.descriptor is not None:
            self._selector.register(self._process.descriptor, selectors.EVENT_READ, self._look)

    def run(self) -> None:
        """Watch, until the process has gone and all that have to know it do."""
        while not self._is_done(now_s := time.monotonic()):
            wakes_s = min([group.node.wakes_at() for group in self._groups.values()], default=now_s + 1.0)
            if self._gone_s is not None or any(group.attempt or group.routes for group in self._groups.values()):
                wakes_s = min(wakes_s, now_s + 0.2)
            ready = self._selector.select(max(0.0, wakes_s - now_s))
            # Commands first: a rank that joins says so to its monitor before it says to others where that is.
            for key, _ in sorted(ready, key=lambda each: each[0].data != self._obey):
                if self._selector.get_map().get(key.fileobj) is not None:  # not closed by another one meanwhile
                    key.data()
            self._work(time.monotonic())

    def _work(self, now_s: float) -> None:
        self._look()
        for key, group in self._groups.items():
            if now_s >= group.node.wakes_at():
                group.node.doing(self._doing(group.node.rank))
                group.node.tick(now_s)
            self._connect(key, group, now_s)
            self._deliver(group, now_s)
        for key in [key for key, group in self._groups.items() if self._is_over(group, now_s)]:
            for link in self._groups.pop(key).links.values():
                self._drop(link)
        for link in [link for link, until_s in self._strangers.items() if now_s > until_s]:
            self._drop(link)
        news = {
            key: {
                "story": [fault.as_json() for fault in group.node.story],
                "busy": group.node.busy,
                "joined": group.node.joined,
            }
            for key, group in self._groups.items()
            if group.left_s is None
        }
        if news != self._told:
            self._told = news
            self._status.tell(news)

    def _is_over(self, group: _Group, now_s: float) -> bool:
        """Whether a group that the rank has left needs its monitor no longer."""
        if group.left_s is None or group.attempt is not None:
            return False
        away_s = now_s - group.left_s
        return away_s > _LINGERS_S or (away_s > _FAREWELL_S and not group.node.children)

    # --- the process ---------------------------------------------------------------------------------------------

    def _doing(self, rank: int) -> list[list[Any]]:
        what, call, text, age_s = self._status.doing()
        return [] if what == status_of.WAITING else [[rank, described(what, call, text), age_s]]

    def _look(self) -> None:
        """Look at the process: is it there, and is it running?"""
        now_s = time.monotonic()
        if self._gone_s is not None:
            return
        if self._process.is_gone():
            self._gone_s = now_s
            if self._process.descriptor is not None:
                self._selector.unregister(self._process.descriptor)
            if self._left is None:
                self._report("died")
        elif not self._process.is_stopped():
            if self._stopped_s is not None and now_s - self._stopped_s >= self._liveness_s:
                for group in self._groups.values():
                    group.node.clear("frozen", now_s)
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        elif now_s - self._stopped_s >= self._liveness_s:
            self._report("frozen")

    def _report(self, reason: str) -> None:
        what, call, text, _ = self._status.doing()
        for group in self._groups.values():
            group.node.report(Fault(group.node.rank, reason, described(what, call, text)), time.monotonic())

    def _is_done(self, now_s: float) -> bool:
        if self._gone_s is None:
            return False
        gone_s = now_s - self._gone_s
        if any(group.addresses and not group.linked for group in self._groups.values()):
            return gone_s > _LOOKS_FOR_PARENT_S
        waited_for = any(group.node.children for group in self._groups.values())
        unsent = any(link.wants_to_send for group in self._groups.values() for link in group.links.values())
        return gone_s > _LINGERS_S or (gone_s > _FAREWELL_S and not waited_for and not unsent)

    # --- commands of the process ---------------------------------------------------------------------------------

    def _obey(self) -> None:
        found = os.read(self._commands, 2**16)
        if not found:  # it has closed its end; whether it has gone is another question
            self._selector.unregister(self._commands)
            return
        *lines, self._unread = (self._unread + found).split(b"\n")
        for line in lines:
            self._command(json.loads(line))

    def _command(self, command: dict[str, Any]) -> None:
        now_s = time.monotonic()
        match command["do"]:
            case "join":
                node = Node(command["rank"], command["size"], self._host, self._liveness_s, now_s)
                self._groups[command["group"]] = _Group(node)
            case "parent":
                group = self._groups[command["group"]]
                group.addresses = [(address, command["port"]) for address in command["addresses"]]
                group.routes, group.token, group.sought_since_s = list(group.addresses), command["token"], now_s
            case "raised":
                group = self._groups[command["group"]]
                group.node.report(Fault(group.node.rank, "raised", command["text"], command["call"]), now_s)
            case "clear":
                self._groups[command["group"]].node.clear("raised", now_s)
            case "leave":
                for key, group in self._groups.items():
                    if command["group"] in (key, None):
                        what, call, step, _ = self._status.doing()
                        text = f"{command['text']} ({described(what, call, step)})"
                        calls = command["calls"].get(key, 0)
                        fault = Fault(group.node.rank, command["reason"], text, calls=calls)
                        group.node.report(fault, now_s)
                        if command["group"] is None:
                            self._left = fault
                        elif command["reason"] == "left":
                            group.left_s = now_s

    # --- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(connection, longest=_LONGEST_HELLO)
            if len(self._strangers) >= _STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[link] = time.monotonic() + _CONNECTS_S
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        """Hear who a stranger is: a child in a tree, that knows this monitor's token."""
        with self._dropping(link):
            for message in link.receive():
                if not secrets.compare_digest(str(message["token"]).encode(), self.token.encode()):
                    raise ValueError("a stranger")
                group = self._groups[message["group"]]
                rank = int(message["rank"])
                if not 0 < rank < group.node.size or parent_of(rank) != group.node.rank:
                    raise ValueError("none of this monitor's children")
                del self._strangers[link]
                link.send({"host": self._host})
                self._keep(group, rank, link, str(message["host"]))
                # What came behind it.
                return self._read(group, rank, link)

    def _keep(self, group: _Group, rank: int, link: Link, host: str) -> None:
        before = group.links.get(rank)
        if before is not None:
            self._drop(before)
        group.links[rank] = link
        link.longest = LONGEST
        group.linked = True
        self._selector.modify(link.socket, selectors.EVENT_READ, lambda: self._read(group, rank, link))
        group.node.connected(rank, host, time.monotonic())

    def _read(self, group: _Group, rank: int, link: Link) -> None:
        with self._losing(group, rank, link):
            for message in link.receive():
                group.node.received(rank, message, time.monotonic())

    def _deliver(self, group: _Group, now_s: float) -> None:
        """Send what a node wants to have sent."""
        messages, group.node.outbox = group.node.outbox, []
        for rank, message in messages:
            if rank in group.links:
                group.links[rank].send(message)
        for rank, link in list(group.links.items()):
            with self._losing(group, rank, link):
                link.flush()

    def _connect(self, key: str, group: _Group, now_s: float) -> None:
        """Come closer to a connection to the parent: one address after the other, again and again."""
        parent = group.node.parent
        if parent is None or parent in group.links or not group.addresses:
            return
        if group.attempt is not None:
            link, until_s = group.attempt
            if now_s <= until_s:
                return
            group.attempt = None
            self._drop(link)
        if not group.routes:
            sought_s = now_s - group.sought_since_s
            if sought_s > self._liveness_s:
                group.node.miss_parent(now_s)
            # Less and less often: it may be behind a firewall.
            group.routes, group.next_attempt_s = list(group.addresses), now_s + min(1.0 + sought_s / 10, 30.0)
        if now_s < group.next_attempt_s:
            return
        address, port = group.routes.pop(0)
        with contextlib.suppress(OSError):
            link = Link(start_connecting(address, port))
            link.send({"group": key, "rank": group.node.rank, "token": group.token, "host": self._host})
            group.attempt = link, now_s + _CONNECTS_S
            self._selector.register(link.socket, selectors.EVENT_WRITE, lambda: self._come_through(group, link))

    def _come_through(self, group: _Group, link: Link) -> None:
        """A connection to the parent is there, or has failed; it counts when the parent has answered."""
        try:
            if link.wants_to_send:
                link.flush()
                self._selector.modify(link.socket, selectors.EVENT_READ, lambda: self._come_through(group, link))
                return
            for message in link.receive():
                group.attempt = None
                group.routes = []
                assert group.node.parent is not None
                self._keep(group, group.node.parent, link, str(message["host"]))
                # What came behind the answer.
                return self._read(group, group.node.parent, link)
        except Exception:  # whatever it was, it does not end this process
            group.attempt = None
            self._drop(link)

    @contextlib.contextmanager
    def _losing(self, group: _Group, rank: int, link: Link) -> Iterator[None]:
        """If a connection ends, or says what no monitor says, tell the node."""
        try:
            yield
        except Exception:  # whatever it was, it does not end this process
            self._drop(link)
            if group.links.get(rank) is link:
                del group.links[rank]
                if rank == group.node.parent:
                    group.addresses = []  # whoever was there does not come back
                group.node.closed(rank, time.monotonic())

    @contextlib.contextmanager
    def _dropping(self, link: Link) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it was, it does not end this process
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._strangers.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.close()


def main() -> None:
    """Become a monitor: `python ... PID MEMORY COMMANDS LIVENESS_S EVERYWHERE HOST`, and say where it listens."""
    pid, memory, commands, liveness_s, everywhere, host = sys.argv[1:]
    monitor = Monitor(int(pid), int(memory), int(commands), float(liveness_s), everywhere == "1", host)
    print(json.dumps({"port": monitor.port, "token": monitor.token}), flush=True)
    # No child of the rank, which may wait for its children; and nothing that a signal to all of them ends.
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("fdp-monitor")  # what top(1) shows
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    monitor.run()
