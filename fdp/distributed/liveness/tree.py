"""The protocol of monitors: a tree of ranks. Faults go up the tree, and one ordered list of faults goes down to all.

There are no sockets and no clock in here: messages come in and go out as values, and time is an argument. So a process
can simulate thousands of ranks.

Each monitor talks to its parent in the tree and to at most `FANOUT` children. What it sends and reads in a second does
not depend on how many ranks there are. A fault goes up to the root, which puts faults in order; the list goes down to
all, so all ranks report the same. A monitor that loses its parent does what the root did, for those below it.

Connections that end and are made again are none of its business: what is sent arrives, once and in order, or its
receiver is lost.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.machines import packed, unpacked
from fdp.distributed.liveness.places import PlaceOfWait, contradiction, merged

FANOUT = 8
"""Children of a monitor."""

_KEPT = 16
"""Faults in a story, and ranks in a list of those that are not waiting: what goes over a link stays small."""

_BEATS = 5
"""Beats in the time after which silence counts."""

_SHORTEST_BEAT_S = 0.05
"""No neighbour gets a report more often, however soon it gives up."""

_PAUSE_S = 0.1
"""At least so long from one story to the next: a job that ends in order has as many faults as ranks."""


@dataclass
class _Link:
    """What is known of a neighbour."""

    heard_s: float
    liveness_s: float = math.inf  # after so much silence it takes this one for lost
    gone: bool = False
    silent: bool = False
    busy: list[list[Any]] = field(default_factory=list)
    places: list[PlaceOfWait] = field(default_factory=list)


def parent_of(rank: int) -> int | None:
    """The parent of a rank in the tree; None for the root.

    Example:
        >>> [parent_of(rank) for rank in (0, 1, 8, 9, 72, 73)]
        [None, 0, 0, 1, 8, 9]
    """
    return (rank - 1) // FANOUT if rank else None


def children_of(rank: int, size: int) -> range:
    """The children of a rank in the tree.

    Example:
        >>> children_of(0, 5), children_of(1, 12), children_of(2, 12)
        (range(1, 5), range(9, 12), range(12, 12))
    """
    return range(min(rank * FANOUT + 1, size), min((rank + 1) * FANOUT + 1, size))


class Node:
    """A monitor among the others of a group.

    Args:
        rank: of the process that it watches.
        size: number of ranks.
        host: what names its machine.
        liveness_s: seconds of silence after which a neighbour is suspected.
        now_s: the time.

    Attributes:
        story: the faults, in the order in which the root heard of them.
        busy: ranks that are not waiting for others: [rank, what they do, since how many seconds], the longest first.
        mismatch: of a deadlock, the two places in which ranks wait for each other; empty if there is none.
        outbox: messages to send: to which rank, and what.
    """

    def __init__(self, rank: int, size: int, host: str, liveness_s: float, now_s: float) -> None:
        self.rank, self.size, self._liveness_s = rank, size, liveness_s
        self.parent = parent_of(rank)
        self._links: dict[int, _Link] = {}
        self._hosts = {rank: host}
        self._own_faults: dict[int, Fault] = {}  # of this rank, and of neighbours that were lost: sent again if need be
        self._first_s = now_s  # when the first fault of the story was noticed
        self._own_busy: list[list[Any]] = []
        self._next_beat_s = now_s
        self._next_story_s, self._story_due = now_s, False
        self._new_hosts: dict[int, str] = {rank: host}  # of which those above have not heard
        self._next_hosts_s = now_s
        self.story: list[Fault] = []
        self.busy: list[list[Any]] = []
        self._own_place: PlaceOfWait | None = None
        self._places: list[PlaceOfWait] = []  # of this rank, and of those below it
        self.mismatch: tuple[PlaceOfWait, ...] = ()
        # Sent to the parent of late, and perhaps lost with it: the time, and the fault, or whose fault is taken back.
        self._sent_up: deque[tuple[float, Fault | tuple[int, str]]] = deque()
        # Decisions that were made while the parent was lost. It has to learn of them.
        self._decided: dict[int, Fault] = {}
        self._taken_back: list[tuple[int, str]] = []
        self.outbox: list[tuple[int, dict[str, Any]]] = []

    @property
    def beat_s(self) -> float:
        """Seconds from one beat to the next: often enough for each neighbour, of which one may be less patient."""
        shortest_s = min((link.liveness_s for link in self._links.values() if not link.gone), default=math.inf)
        return min(self._liveness_s / _BEATS, max(shortest_s / _BEATS, _SHORTEST_BEAT_S))

    @property
    def leads(self) -> bool:
        """Whether it orders faults for those below it: the root does, and a node that has lost its parent."""
        return self.parent is None or not self._in_touch(self.parent)

    @property
    def children(self) -> list[int]:
        """The connected children."""
        return [rank for rank, link in self._links.items() if rank != self.parent and not link.gone]

    def wakes_at(self) -> float:
        """When to call `tick` next."""
        return min(self._next_beat_s, self._next_story_s) if self._story_due else self._next_beat_s

    def connected(self, peer: int, host: str, now_s: float, liveness_s: float = math.inf) -> None:
        """Handle a connected neighbour: new, given up before, or one whose messages were lost.

        Args:
            peer: the rank that it watches.
            host: what names its machine.
            now_s: the time.
            liveness_s: seconds of silence after which it takes this one for lost.
        """
        self._links[peer] = _Link(now_s, liveness_s)
        self._next_beat_s = min(self._next_beat_s, now_s + self.beat_s)
        self._learn({peer: host})
        self._forget(peer)
        self._greet(peer)

    def heard(self, peer: int, now_s: float) -> None:
        """Handle a sign of life of a neighbour."""
        link = self._links[peer]
        link.heard_s = now_s
        if link.silent:
            link.silent = False
            self._forget(peer)
            self._greet(peer)

    def received(self, peer: int, message: dict[str, Any], now_s: float) -> None:
        """Handle a message of a neighbour.

        Raises:
            ValueError: nothing that a monitor says.
        """
        self.heard(peer, now_s)
        if "report" in message:
            self._hear(Fault.from_json(message["report"]), now_s)
        if "clear" in message:
            rank, what = message["clear"]
            self._clear(int(rank), str(what), now_s)
        if "story" in message and peer == self.parent:
            self.story = [Fault.from_json(each) for each in message["story"]]
            self._tell(now_s)
        if "hosts" in message:
            self._learn(unpacked(message["hosts"], self.size))
            if peer == self.parent:
                self._new_hosts = {}
                for child in self.children:
                    self._send(child, hosts=message["hosts"])
        if "places" in message and peer != self.parent:
            self._links[peer].places = [PlaceOfWait.from_json(each) for each in message["places"]]
            self._look_at_places(now_s)
        if "mismatch" in message:
            self._mismatches(tuple(map(PlaceOfWait.from_json, message["mismatch"])))
        if "busy" in message:
            self._links[peer].busy = found = _checked_busy(message["busy"])
            if peer == self.parent:
                self.busy = found

    def closed(self, peer: int, now_s: float) -> None:
        """Handle the end of the monitor of a neighbour, who may be unknown so far."""
        link = self._links.setdefault(peer, _Link(now_s))
        link.gone = True
        if not any(fault.rank == peer and not fault.suspected for fault in self.story):
            self._suspect(Fault(peer, "died", "its monitor has ended", suspected=True), now_s)
        elif peer == self.parent:
            self._lead(now_s)
            self._tell(now_s)  # whoever comes after it leads from now on

    def tick(self, now_s: float) -> None:
        """Do the due work."""
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.beat_s
            self._beat(now_s)
        if self._story_due and now_s >= self._next_story_s:
            self._tell(now_s)

    def doing(self, busy: list[list[Any]]) -> None:
        """What the watched rank does: one entry as in `busy`, or none if it waits for others."""
        self._own_busy = busy

    def waits(self, place: PlaceOfWait | None, now_s: float) -> None:
        """Where the rank that is watched waits for others, for some time already; None if it goes on."""
        self._own_place = place
        self._look_at_places(now_s)

    def report(self, fault: Fault, now_s: float) -> None:
        """Report a fault of the watched rank."""
        if self._own_faults.get(fault.rank) == fault:
            return
        self._own_faults[fault.rank] = fault
        self._hear(fault, now_s)

    def clear(self, what: str, now_s: float) -> None:
        """Withdraw a fault of the watched rank: it is not "frozen" any more, or has caught what it "raised"."""
        own = self._own_faults.get(self.rank)
        if own is not None and _is_what(own, what):
            del self._own_faults[self.rank]
        self._clear(self.rank, what, now_s)

    def conclude(self, rank: int, text: str, now_s: float) -> None:
        """Report that the watched rank has found out that another one has died, whose own monitor is silent."""
        if rank != self.rank and not any(fault.rank == rank for fault in self.story):
            self._suspect(Fault(rank, "died", text, suspected=True), now_s)

    # --- faults go up, one story goes down -----------------------------------------------------------------------

    def _send_up(self, what: Fault | tuple[int, str], now_s: float) -> None:
        """Report a fault to the parent, or withdraw one."""
        assert self.parent is not None
        # Older than this it has arrived, or the parent would count as lost by now.
        while self._sent_up and now_s - self._sent_up[0][0] > self._liveness_s + 2 * self.beat_s:
            self._sent_up.popleft()
        self._sent_up.append((now_s, what))
        self._send(self.parent, **({"report": what.as_json()} if isinstance(what, Fault) else {"clear": list(what)}))

    def _lead(self, now_s: float) -> None:
        """Handle a lost parent: collect what it may not have passed on."""
        sent, self._sent_up = self._sent_up, deque()
        for _, what in sent:
            if isinstance(what, Fault):
                self._hear(what, now_s)
            else:
                self._clear(*what, now_s)

    def _greet(self, peer: int) -> None:
        """Send a connected neighbour what it does not know."""
        if self.mismatch:
            self._send(peer, mismatch=[place.as_json() for place in self.mismatch])
        if peer != self.parent:
            self._send(peer, hosts=packed(self._hosts), story=[fault.as_json() for fault in self.story])
            return
        self._new_hosts = dict(self._hosts)
        for rank, what in self._taken_back:
            self._send(peer, clear=[rank, what])
        for fault in {**self._own_faults, **self._decided}.values():
            if fault.rank != peer:
                self._send(peer, report=fault.as_json())
        self._taken_back, self._decided = [], {}

    def _hear(self, fault: Fault, now_s: float) -> None:
        if not self.leads:
            return self._send_up(fault, now_s)
        known = {each.rank: at for at, each in enumerate(self.story)}
        at = known.get(fault.rank)
        if not self.story:
            self._first_s = now_s
        fault = replace(fault, after_s=now_s - self._first_s)
        if at is None:
            if len(self.story) >= _KEPT:
                # What may be taken back makes room for what is final.
                spare = [each for each in self.story if each.call is not None or each.suspected]
                if not spare or fault.call is not None or fault.suspected:
                    return
                self.story.remove(spare[-1])
            self.story.append(fault)
        elif (self.story[at].suspected and not fault.suspected) or self.story[at].call is not None:
            self.story[at] = fault
        else:
            return
        if self.parent is not None:
            self._decided[fault.rank] = fault
        self._tell(now_s)

    def _clear(self, rank: int, what: str, now_s: float) -> None:
        if not self.leads:
            return self._send_up((rank, what), now_s)
        if self.parent is not None:
            if rank in self._decided and _is_what(self._decided[rank], what):
                del self._decided[rank]
            if (rank, what) not in self._taken_back:
                self._taken_back.append((rank, what))
        if any(fault.rank == rank and _is_what(fault, what) for fault in self.story):
            self.story = [fault for fault in self.story if fault.rank != rank or not _is_what(fault, what)]
            self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        """Pass the list of faults on to the children; at most ten times a second."""
        if now_s < self._next_story_s:
            self._story_due = True
            return
        self._story_due, self._next_story_s = False, now_s + _PAUSE_S
        for child in self.children:
            self._send(child, story=[fault.as_json() for fault in self.story])

    def _suspect(self, fault: Fault, now_s: float) -> None:
        """Suspect a lost neighbour, and if it was silent, also the others on its machine."""
        if fault.rank == self.parent:
            self._lead(now_s)
        same = [fault.rank]
        if fault.reason == "unreachable":
            host = self._hosts.get(fault.rank)
            same = sorted(
                rank for rank, other in self._hosts.items() if other == host and host != self._hosts[self.rank]
            )
        for rank in same or [fault.rank]:
            lost = Fault(rank, fault.reason, fault.text, suspected=True)
            self._own_faults[rank] = lost
            self._hear(lost, now_s)
        if fault.rank == self.parent:
            self._tell(now_s)

    def _forget(self, peer: int) -> None:
        """Withdraw the suspicion of a neighbour, and of those that were suspected with it."""
        host, now_s = self._hosts.get(peer), self._links[peer].heard_s
        for rank in [rank for rank in self._own_faults if self._hosts.get(rank) == host or rank == peer]:
            if not self._own_faults[rank].suspected:
                continue
            del self._own_faults[rank]
            if rank in self._decided and self._decided[rank].suspected:
                del self._decided[rank]
            if rank in self._links and self._links[rank].silent:  # it is given as much time as at first
                self._links[rank].silent, self._links[rank].heard_s = False, now_s
            self._clear(rank, "suspected", now_s)
            if not self.leads:
                self.story = [fault for fault in self.story if fault.rank != rank or not fault.suspected]

    # --- beats ---------------------------------------------------------------------------------------------------

    def _beat(self, now_s: float) -> None:
        for peer, link in self._links.items():
            if not link.gone and not link.silent and now_s - link.heard_s > self._liveness_s:
                link.silent = True
                text = f"nothing was heard of it for {now_s - link.heard_s:.0f} s"
                self._suspect(Fault(peer, "unreachable", text, suspected=True), now_s)
        children = self.children
        busy = [*self._own_busy, *(entry for child in children for entry in self._links[child].busy)]
        busy = sorted(busy, key=lambda entry: -entry[2])[:_KEPT]
        if self.leads:
            self.busy = busy
        self._tell_hosts(now_s)
        if self.parent in self._links and not self._links[self.parent].gone:
            self._send(self.parent, busy=busy, places=[place.as_json() for place in self._places])
        for child in children:
            self._send(child, busy=self.busy)

    def _look_at_places(self, now_s: float) -> None:
        below = [place for child in self.children for place in self._links[child].places]
        found = merged(below if self._own_place is None else [self._own_place, *below])
        if found == self._places:
            return
        self._places = found
        self._next_beat_s = min(self._next_beat_s, now_s + _PAUSE_S)
        if (pair := contradiction(found)) is not None:
            self._mismatches(pair)

    def _mismatches(self, pair: tuple[PlaceOfWait, ...]) -> None:
        """Ranks wait in different places: all have to know, and it is never taken back."""
        if self.mismatch:
            return
        self.mismatch = pair
        for peer in self._links:
            self._send(peer, mismatch=[place.as_json() for place in pair])

    def _learn(self, hosts: dict[int, str]) -> None:
        new = {rank: host for rank, host in hosts.items() if self._hosts.get(rank) != host}
        self._hosts.update(new)
        self._new_hosts.update(new)

    def _tell_hosts(self, now_s: float) -> None:
        """Pass on which ranks are on which machine: new entries upwards, and the whole, large table downwards."""
        if not self._new_hosts:
            return
        if not self.leads:
            assert self.parent is not None
            self._send(self.parent, hosts=packed(self._new_hosts))
        elif now_s >= self._next_hosts_s or len(self._hosts) == self.size:  # all are known: the last time
            self._next_hosts_s = now_s + self._liveness_s
            for child in self.children:
                self._send(child, hosts=packed(self._hosts))
        else:
            return
        self._new_hosts = {}

    def _in_touch(self, peer: int) -> bool:
        link = self._links.get(peer)
        return link is not None and not link.gone and not link.silent

    def _send(self, peer: int, **message: Any) -> None:
        self.outbox.append((peer, message))


def _is_what(fault: Fault, what: str) -> bool:
    """Whether a fault is of a kind that can be taken back: "suspected", "frozen", or "raised" in a call."""
    return {"suspected": fault.suspected, "frozen": fault.reason == "frozen", "raised": fault.call is not None}.get(
        what, False
    )


def _checked_busy(found: Any) -> list[list[Any]]:
    return [[int(rank), str(text)[:400], float(age_s)] for rank, text, age_s in found[:_KEPT]]
