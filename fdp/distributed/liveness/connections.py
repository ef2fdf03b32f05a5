"""The connections of a monitor: who may connect, and how a connection that has ended is made again.

A monitor connects to its parent. If that does not work, the parent connects to it. Whoever connects names its monitor
and sends a token from the store, every time.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fdp.distributed.liveness.links import LONGEST, MonitorLink, listen, start_connecting
from fdp.distributed.liveness.neighbour import LETS_CONNECT_S, Attempt, Neighbour
from fdp.distributed.liveness.tree import Node, children_of

_STRANGERS = 64
"""So many may be connected at once that have not said who they are; the oldest goes."""

_LONGEST_HELLO = 4096

_PARTS_S = 15.0
"""So long the other side may take to read the last message."""

_LOOKS_S = 0.05
"""From one look to the next whether it has."""

_INTRODUCES_S = 3.0
"""So long a stranger may take to say who it is."""


@dataclass
class WatchedGroup:
    """A group of ranks that this rank belongs to.

    Attributes:
        node: this monitor among those of the group.
        neighbours: the monitors next to it, by rank.
        left_s: since when the rank is no longer in the group; None if it is.
    """

    node: Node
    neighbours: dict[int, Neighbour] = field(default_factory=dict)
    left_s: float | None = None

    def __post_init__(self) -> None:
        if self.node.parent is not None:
            self.neighbours[self.node.parent] = Neighbour(self.node.parent, is_child=False)
        for rank in children_of(self.node.rank, self.node.size):
            self.neighbours[rank] = Neighbour(rank, is_child=True)

    @property
    def parent(self) -> Neighbour | None:
        """The monitor above this one."""
        return None if self.node.parent is None else self.neighbours[self.node.parent]


class Connections:
    """The connections of a monitor.

    Args:
        selector: that says when something can be read or written; what is registered with it is to be called then.
        liveness_s: seconds after which a rank that is silent counts as lost.
        everywhere: whether other machines may connect.
        host: what names this machine.

    Attributes:
        groups: by their keys.
        port: at which this monitor listens.
        token: that whoever connects has to know.
        hurries: whether the rank has gone, so that others should hear of it soon.
    """

    def __init__(self, selector: selectors.BaseSelector, liveness_s: float, everywhere: bool, host: str) -> None:
        self._selector, self._liveness_s, self._host = selector, liveness_s, host
        self._listening = listen(everywhere)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.groups: dict[str, WatchedGroup] = {}
        self.hurries = False
        self._strangers: dict[MonitorLink, float] = {}
        self._parting: dict[MonitorLink, float] = {}
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def work(self, key: str, group: WatchedGroup, now_s: float) -> None:
        """Do the due work of a group: look for neighbours, and send the messages of its node."""
        for neighbour in group.neighbours.values():
            self._seek(key, group, neighbour, now_s)
        messages, group.node.outbox = group.node.outbox, []
        for rank, message in messages:
            numbered, link = group.neighbours[rank].session.say(message), group.neighbours[rank].link
            if link is not None:
                link.send(numbered)
        for neighbour in group.neighbours.values():
            if neighbour.link is not None:
                # If it has ended, it is read to its end first: what was said last may still be there.
                with contextlib.suppress(OSError):
                    neighbour.link.flush()

    def drop_late(self, now_s: float) -> None:
        """Close connections that took too long: to say who they are, or to read a goodbye."""
        for link in [link for link, until_s in (self._strangers | self._parting).items() if now_s > until_s]:
            self._drop(link)

    def wakes_at(self, group: WatchedGroup, now_s: float) -> float:
        """When to call `work` next, if nothing happens before; infinity for never."""
        return min(
            (
                neighbour.next_attempt_s if neighbour.attempt is None else neighbour.attempt.until_s
                for neighbour in group.neighbours.values()
                if neighbour.is_sought(now_s, self._stale_s)
            ),
            default=math.inf,
        )

    def say_goodbye(self, group: WatchedGroup) -> None:
        """End the connections of a group: this monitor has nothing more to send there."""
        for neighbour in group.neighbours.values():
            neighbour.over = True
            if neighbour.attempt is not None:
                self._drop(neighbour.attempt.link)
            if neighbour.link is not None:
                neighbour.link.send({"bye": True})
                self._part(neighbour.link)
                neighbour.link = None

    def close_when_read(self) -> None:
        """Take no more connections, and wait until what was said has been read; for a limited time."""
        self._selector.unregister(self._listening)
        self._listening.close()
        while self._parting:
            for link in list(self._parting):
                self._see_off(link)
            self.drop_late(time.monotonic())
            time.sleep(_LOOKS_S)

    def unreached(self, group: WatchedGroup, now_s: float) -> list[tuple[int, str, str]]:
        """Neighbours that were never reached at their known addresses: rank, addresses, and the reason."""
        patience_s = max(self._liveness_s, 5.0)  # under load, a monitor may take its time to answer
        return [
            (neighbour.rank, neighbour.where(), neighbour.failure)
            for neighbour in group.neighbours.values()
            if neighbour.port
            and not (neighbour.met or neighbour.gone or neighbour.over)
            and now_s - neighbour.sought_since_s > patience_s
        ]

    @property
    def _about_itself(self) -> dict[str, Any]:
        """What either side says when they meet: ranks may be more or less patient, and beat for the least."""
        return {"host": self._host, "liveness_s": self._liveness_s}

    @property
    def _stale_s(self) -> float:
        return self._liveness_s / 2

    # --- others connect to this monitor ----------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = MonitorLink(connection, longest=_LONGEST_HELLO)
            if len(self._strangers) >= _STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[link] = time.monotonic() + _INTRODUCES_S
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(link))

    def _greet(self, link: MonitorLink) -> None:
        """Identify a new connection: it must come from a neighbour in a tree that knows this monitor's token."""
        with self._dropping(link):
            for message in link.receive():
                if not secrets.compare_digest(str(message["token"]).encode(), self.token.encode()):
                    raise ValueError("a stranger")
                group = self.groups.get(str(message["group"]))
                if group is None:
                    link.send({"over": True})
                    link.flush()
                    raise ValueError("a group that this rank has left")
                neighbour = group.neighbours.get(int(message["rank"]))
                if neighbour is None:
                    raise ValueError("no neighbour of this monitor")
                if not neighbour.is_child and neighbour.attempt is not None and neighbour.attempt.greeted:
                    raise ValueError("it is about to answer this monitor")
                del self._strangers[link]
                link.send({**self._about_itself, "received": neighbour.session.received})
                self._keep(group, neighbour, link, message)
                # What came behind it.
                return self._read(group, neighbour, link)

    # --- this monitor connects to others ---------------------------------------------------------------------------

    def _seek(self, key: str, group: WatchedGroup, neighbour: Neighbour, now_s: float) -> None:
        """Try to connect to a neighbour: one address after the other, repeatedly."""
        if neighbour.attempt is not None:
            if now_s <= neighbour.attempt.until_s:
                return
            self._fail(group, neighbour, neighbour.attempt.address, TimeoutError("it did not answer"))
        if not neighbour.is_sought(now_s, self._stale_s):
            return
        if neighbour.link is not None and neighbour.heard_s > neighbour.sought_since_s:
            neighbour.seek(now_s)  # the connection may be dead, though nothing says so
        if now_s < neighbour.next_attempt_s:
            return
        address = neighbour.next_address(now_s)
        if address is None:
            return
        try:
            link = MonitorLink(start_connecting(address, neighbour.port))
        except OSError as error:
            return self._fail(group, neighbour, address, error)
        attempt = neighbour.attempts(link, address, neighbour.asks_only(now_s, self.hurries), now_s)
        if not attempt.asks:
            hello = {"group": key, "rank": group.node.rank, "token": neighbour.token, **self._about_itself}
            link.send({**hello, "received": neighbour.session.received})
        self._selector.register(
            link.socket, selectors.EVENT_WRITE, lambda: self._come_through(group, neighbour, attempt)
        )

    def _come_through(self, group: WatchedGroup, neighbour: Neighbour, attempt: Attempt) -> None:
        """Handle a connection that was made or failed; it counts when the neighbour has answered."""
        link = attempt.link
        try:
            if not attempt.greeted:
                number = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    raise OSError(number, os.strerror(number))
                if attempt.asks:  # something listens there: it will connect itself
                    self._drop(link)
                    neighbour.attempt = None
                    neighbour.next_attempt_s = neighbour.sought_since_s + LETS_CONNECT_S
                    return
                link.flush()
                if not link.wants_to_send:
                    attempt.greeted = True
                    again: Callable[[], None] = lambda: self._come_through(group, neighbour, attempt)  # noqa: E731
                    self._selector.modify(link.socket, selectors.EVENT_READ, again)
                return
            for message in link.receive():
                if "over" in message:
                    neighbour.over, neighbour.attempt = True, None
                    self._drop(link)
                    return self._end(group, neighbour)
                self._keep(group, neighbour, link, message)
                # What came behind the answer.
                return self._read(group, neighbour, link)
        except Exception as error:  # whatever it was, it does not end this process
            self._fail(group, neighbour, attempt.address, error)

    def _fail(self, group: WatchedGroup, neighbour: Neighbour, address: str, error: Exception) -> None:
        if neighbour.attempt is not None:
            self._drop(neighbour.attempt.link)
            neighbour.attempt = None
        neighbour.failure = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if neighbour.shows_end(address, error):
            self._end(group, neighbour)

    def _end(self, group: WatchedGroup, neighbour: Neighbour) -> None:
        """Handle the end of a neighbour, or that its rank has left the group."""
        if neighbour.link is not None:
            self._drop(neighbour.link)
            neighbour.link = None
        if not neighbour.gone:
            neighbour.gone = True
            group.node.closed(neighbour.rank, time.monotonic())

    # --- connections that are there --------------------------------------------------------------------------------

    def _keep(self, group: WatchedGroup, neighbour: Neighbour, link: MonitorLink, message: dict[str, Any]) -> None:
        """Take a connection as the one to the neighbour, and continue where the last one ended."""
        host, received, now_s = str(message["host"]), int(message["received"]), time.monotonic()
        liveness_s = float(message["liveness_s"])
        if not liveness_s > 0:
            raise ValueError("no number of seconds")
        if neighbour.attempt is not None and neighbour.attempt.link is not link:
            self._drop(neighbour.attempt.link)
        if neighbour.link is not None:
            self._drop(neighbour.link)
        neighbour.attempt, neighbour.link, neighbour.heard_s = None, link, now_s
        neighbour.came_from(link.socket.getpeername()[0])
        link.longest = LONGEST
        self._selector.modify(link.socket, selectors.EVENT_READ, lambda: self._read(group, neighbour, link))
        unheard, is_all = neighbour.session.resume(received)
        for unheard_message in unheard:
            link.send(unheard_message)
        if not neighbour.met or neighbour.gone or not is_all:
            group.node.connected(neighbour.rank, host, now_s, liveness_s)
        else:
            group.node.heard(neighbour.rank, now_s)
        neighbour.met, neighbour.gone = True, False

    def _read(self, group: WatchedGroup, neighbour: Neighbour, link: MonitorLink) -> None:
        with self._losing(group, neighbour, link):
            for message in link.receive():
                neighbour.heard_s = time.monotonic()
                if "bye" in message:
                    neighbour.over = True
                    raise ConnectionResetError
                if neighbour.session.take(message):
                    group.node.received(neighbour.rank, message, neighbour.heard_s)

    @contextlib.contextmanager
    def _losing(self, group: WatchedGroup, neighbour: Neighbour, link: MonitorLink) -> Iterator[None]:
        """If a connection ends, or sends something invalid, look for the neighbour again."""
        try:
            yield
        except Exception:  # whatever it was, it does not end this process
            self._drop(link)
            if neighbour.link is link:
                neighbour.link = None
                if neighbour.over:
                    self._end(group, neighbour)
                else:
                    neighbour.seek(time.monotonic())

    @contextlib.contextmanager
    def _dropping(self, link: MonitorLink) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it was, it does not end this process
            self._drop(link)

    def _part(self, link: MonitorLink) -> None:
        """Send what is left, and close the connection when the other side has closed it; after a while in any case.

        If it was closed at once, what the other side still writes would reset it.
        """
        self._parting[link] = time.monotonic() + _PARTS_S
        self._see_off(link)

    def _see_off(self, link: MonitorLink) -> None:
        """Send more of what is left; behind the last of it comes the end. What still arrives is not looked at."""
        with self._dropping(link):
            link.flush()
            events = selectors.EVENT_READ
            if link.wants_to_send:
                events |= selectors.EVENT_WRITE
            else:
                link.finish()
            self._selector.modify(link.socket, events, lambda: self._see_off(link))
            for _ in link.receive():
                pass

    def _drop(self, link: MonitorLink) -> None:
        self._strangers.pop(link, None)
        self._parting.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.close()
