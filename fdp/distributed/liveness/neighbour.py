"""A monitor next to this one in the tree: its addresses, the connection to it, and why that failed."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from fdp.distributed.liveness.links import MonitorLink
from fdp.distributed.liveness.session import Session

LETS_CONNECT_S = 0.5
"""So long a parent leaves it to its child to connect: two connections at once would end each other."""

_CONNECTS_S = 3.0
"""So long it waits for a connection to one address."""

_RESTS_S = 30.0
"""So long it rests between two rounds of its addresses, at most: it may be behind a firewall."""


@dataclass
class Attempt:
    """A connection that is being made.

    Attributes:
        link: the connection.
        address: to which.
        until_s: when it is given up.
        asks: it is only asked whether anything listens there; nothing is said.
        greeted: whether the connection was made and this monitor has sent its name.
    """

    link: MonitorLink
    address: str
    until_s: float
    asks: bool
    greeted: bool = False


@dataclass
class Neighbour:
    """What a monitor knows of one next to it.

    Attributes:
        rank: that it watches.
        is_child: whether it is below this one in the tree.
        session: what the two say to each other.
        link: the connection; None while there is none.
        heard_s: when something came over it last.
        attempt: the connection that is being made.
        met: whether there ever was a connection.
        gone: whether it has ended, as far as is known.
        over: whether it has said so.
        port: at which it listens; 0 if that is not known.
        token: what it wants to hear.
        is_here: whether it is on this machine.
        sought_since_s: since when it is looked for.
        next_attempt_s: when it is looked for next.
        failure: why the last attempt came to nothing.
    """

    rank: int
    is_child: bool
    session: Session = field(default_factory=Session)
    link: MonitorLink | None = None
    heard_s: float = 0.0
    attempt: Attempt | None = None
    met: bool = False
    gone: bool = False
    over: bool = False
    port: int = 0
    token: str = ""
    is_here: bool = False
    sought_since_s: float = 0.0
    next_attempt_s: float = 0.0
    failure: str = ""
    _addresses: tuple[str, ...] = ()
    _untried: list[str] = field(default_factory=list)
    _worked: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether there was a connection, which may be made again."""
        return self.met and self.link is None and not (self.gone or self.over)

    def is_sought(self, now_s: float, stale_s: float) -> bool:
        """Whether a connection has to be made.

        Args:
            now_s: the time.
            stale_s: after so many seconds of silence a connection may be dead, though nothing says so.
        """
        if self.over or not self.port:
            return False
        return self.link is None or (not self.is_child and now_s - self.heard_s > stale_s)

    def is_at(self, addresses: list[str], port: int, token: str, is_here: bool, now_s: float) -> None:
        """Set its addresses."""
        self._addresses = ("127.0.0.1",) if is_here else tuple(addresses)
        self.port, self.token, self.is_here = port, token, is_here
        self.seek(now_s)

    def seek(self, now_s: float) -> None:
        """Begin to look for it, at its last address."""
        self.sought_since_s = self.next_attempt_s = now_s
        self._untried = sorted(self._addresses, key=lambda address: address != self._worked)

    def next_address(self, now_s: float) -> str | None:
        """The next address to try; after each round of the addresses the pause grows."""
        if not self._untried:
            self._untried = list(self._addresses)
            self.next_attempt_s = now_s + min(0.2 + (now_s - self.sought_since_s) / 5, _RESTS_S)
            return None
        return self._untried.pop(0)

    def attempts(self, link: MonitorLink, address: str, asks: bool, now_s: float) -> Attempt:
        """Note that a connection is being made."""
        self.attempt = Attempt(link, address, now_s + _CONNECTS_S, asks)
        return self.attempt

    def asks_only(self, now_s: float, hurries: bool) -> bool:
        """Whether to ask only if it is there, since it is about to connect itself."""
        return self.is_child and not hurries and now_s - self.sought_since_s < LETS_CONNECT_S

    def shows_end(self, address: str, error: BaseException) -> bool:
        """Whether an attempt that failed shows that the monitor has ended.

        Only where it is known to have been: an address of another machine may be this one's, too (of a bridge), and
        what refuses there may be a firewall.
        """
        return isinstance(error, ConnectionRefusedError) and (self.is_here or (self.met and address == self._worked))

    def came_from(self, address: str) -> None:
        """Note that a connection to an address, or from it, was made."""
        found = ipaddress.ip_address(address.split("%")[0])
        mapped = getattr(found, "ipv4_mapped", None)
        self._worked = str(mapped or found)

    def where(self) -> str:
        """Its addresses, for a message."""
        return ", ".join(f"[{each}]:{self.port}" if ":" in each else f"{each}:{self.port}" for each in self._addresses)
