"""The small process beside a rank: watches it, and talks to the monitors of other ranks.

It is a process and not a thread, so that nothing in the rank can stop it: a long first call, an operator that
keeps Python's lock, or a signal that stops the rank. It imports neither torch nor the rest of fdp.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.connections import Connections, WatchedGroup
from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.news import encoded
from fdp.distributed.liveness.places import PlaceOfWait
from fdp.distributed.liveness.process import Process
from fdp.distributed.liveness.status import ROOM_BYTES, Status, activity_text
from fdp.distributed.liveness.tree import Node

_LONGEST_SLEEP_S = 3600.0
"""So long it sleeps at most: the system knows no limit of months, such as a patience of years leads to."""

_LINGERS_S = 15.0
"""So long a monitor stays, at most, when its rank has gone: others may still have to hear why."""

_LOOKS_FOR_PARENT_S = 120.0
"""So long it stays, at most, if it has something to say and its parent was never there."""

_FAREWELL_S = 1.0
"""So long it stays at least, so that what it said last is read."""


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
        self._selector = selectors.DefaultSelector()
        self._connections = Connections(self._selector, liveness_s, everywhere, host)
        self.port, self.token = self._connections.port, self._connections.token
        self._groups = self._connections.groups
        self._stopped_s: float | None = None
        self._gone_s: float | None = None
        self._left: Fault | None = None
        self._told: Any = None
        self._selector.register(commands, selectors.EVENT_READ, self._obey)
        if self._process.descriptor is not None:
            self._selector.register(self._process.descriptor, selectors.EVENT_READ, self._look)

    def run(self) -> None:
        """Watch until the process has ended, and all other monitors that need to know it know it."""
        while not self._is_done(now_s := time.monotonic()):
            wakes_s = min((self._wakes_at(group, now_s) for group in self._groups.values()), default=now_s + 1.0)
            if self._gone_s is not None:
                wakes_s = min(wakes_s, now_s + 0.2)
            ready = self._selector.select(min(max(0.0, wakes_s - now_s), _LONGEST_SLEEP_S))
            # Commands first: a rank that joins says so to its monitor before it says to others where that is.
            for key, _ in sorted(ready, key=lambda each: each[0].data != self._obey):
                # One before it may have closed it, and registered another one with the same number.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            self._work(time.monotonic())
        for group in self._groups.values():
            self._connections.say_goodbye(group)
        self._connections.close_when_read()

    def _wakes_at(self, group: WatchedGroup, now_s: float) -> float:
        return min(group.node.wakes_at(), self._connections.wakes_at(group, now_s))

    def _work(self, now_s: float) -> None:
        self._look()
        for key, group in self._groups.items():
            if now_s >= group.node.wakes_at():
                group.node.doing(self._doing(group.node.rank))
                group.node.tick(now_s)
            self._connections.work(key, group, now_s)
        self._connections.drop_late(now_s)
        for key in [key for key, group in self._groups.items() if self._is_over(group, now_s)]:
            self._connections.say_goodbye(self._groups.pop(key))
        news = {
            key: {
                "story": [fault.as_json() for fault in group.node.story],
                "busy": group.node.busy,
                "mismatch": [place.as_json() for place in group.node.mismatch],
                "unreached": self._connections.unreached(group, now_s),
            }
            for key, group in self._groups.items()
            if group.left_s is None
        }
        if news != self._told:
            self._told = news
            self._status.tell(encoded(news, ROOM_BYTES))

    def _is_over(self, group: WatchedGroup, now_s: float) -> bool:
        """Whether a group that the rank has left no longer needs its monitor."""
        if group.left_s is None or (group.parent is not None and group.parent.attempt is not None):
            return False
        away_s = now_s - group.left_s
        return away_s > _LINGERS_S or (away_s > _FAREWELL_S and not self._has_listeners(group))

    def _has_listeners(self, group: WatchedGroup) -> bool:
        """Whether other monitors may still need messages of this one."""
        return bool(group.node.children) or any(
            neighbour.is_lost or (neighbour.is_child and not (neighbour.met or neighbour.gone))
            for neighbour in group.neighbours.values()
        )

    # --- the process ---------------------------------------------------------------------------------------------

    def _doing(self, rank: int) -> list[list[Any]]:
        what, call, text, age_s = self._status.doing()
        return [] if what == status_of.WAITING else [[rank, activity_text(what, call, text), age_s]]

    def _look(self) -> None:
        """Check whether the process exists, and whether it runs."""
        now_s = time.monotonic()
        if self._gone_s is not None:
            return
        if self._process.is_gone():
            self._gone_s, self._connections.hurries = now_s, True
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
            group.node.report(Fault(group.node.rank, reason, activity_text(what, call, text)), time.monotonic())

    def _is_done(self, now_s: float) -> bool:
        if self._gone_s is None:
            return False
        gone_s = now_s - self._gone_s
        if any(group.parent and not (group.parent.met or group.parent.gone) for group in self._groups.values()):
            return gone_s > _LOOKS_FOR_PARENT_S
        waited_for = any(self._has_listeners(group) for group in self._groups.values())
        links = [neighbour.link for group in self._groups.values() for neighbour in group.neighbours.values()]
        unsent = any(link is not None and link.wants_to_send for link in links)
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
        if command["do"] == "join":
            node = Node(command["rank"], command["size"], self._host, self._liveness_s, now_s)
            self._groups[command["group"]] = WatchedGroup(node)
            return
        if command["do"] == "leave":
            return self._leave(command, now_s)
        group = self._groups.get(command["group"])
        if group is None:  # the rank has left it
            return
        match command["do"]:
            case "neighbour":
                found = group.neighbours[command["rank"]]
                is_here = command["host"] == self._host
                found.is_at(command["addresses"], command["port"], command["token"], is_here, now_s)
            case "raised":
                call, attempt = command["call"], command["attempt"]
                group.node.report(Fault(group.node.rank, "raised", command["text"], call, attempt=attempt), now_s)
            case "clear":
                group.node.clear("raised", now_s)
            case "waits":
                place = command["place"]
                group.node.waits(None if place is None else PlaceOfWait.from_json(place), now_s)
            case "conclude":
                group.node.conclude(command["rank"], command["text"], now_s)

    def _leave(self, command: dict[str, Any], now_s: float) -> None:
        what, call, step, _ = self._status.doing()
        text = f"{command['text']} ({activity_text(what, call, step)})"
        for key, group in self._groups.items():
            if command["group"] not in (key, None):
                continue
            calls, because = command["calls"].get(key, 0), tuple(command["because"].get(key, ()))
            fault = Fault(group.node.rank, command["reason"], text, calls=calls, because=because)
            group.node.report(fault, now_s)
            if command["group"] is None:
                self._left, self._connections.hurries = fault, True
            elif command["reason"] == "left":
                group.left_s = now_s


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
