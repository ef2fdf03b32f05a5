"""What a rank knows of the other ranks of a group, and what it reports of itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.fault import Fault, order_by_cause, with_causes
from fdp.distributed.liveness.news import TEXT_BYTES, shortened
from fdp.distributed.liveness.own_monitor import OwnMonitor
from fdp.distributed.liveness.places import PlaceOfWait
from fdp.errors import PeerError, first_line


@dataclass
class Watched:
    """The ranks of a group, as far as this one knows.

    Attributes:
        key: of the group, in messages to the monitor.
        rank: this one's.
        size: number of ranks.
        monitor: the process beside this rank.
        calls: of steps on the group on this rank, as far as all messages of theirs were there.
        calling: which call is under way, from 1 on; None between calls.
        attempt: which attempt at that call, from 1 on: ranks that raised before any message may make it again.
        step: the name of the step that was called last.
        number: which call of that step.
        raised: whether the last call ended in an error that other ranks may wait for.
        desynchronised: whether it left a call in the middle of its messages, and cannot go on.
        version: of the news that were read last.
        news: what the monitor has heard.
        awaited: says what a step waits for, or waited for last; None outside of steps.
        has_warned: whether there was a warning of monitors that cannot be reached.
        gave_up_on: ranks for want of which this one has left a call in the middle, and what had become of each.
        waits_since_s: since when this rank waits for others, by the monotonic clock; None if it does not.
        turns: in exchanges through the store, as many as this rank has taken.
        messages: as many as this rank has started, of those whose starts are seen on all ranks.
        exchanging: whether it waits in an exchange whose turn was the last one.
    """

    key: str
    rank: int
    size: int
    monitor: OwnMonitor
    calls: int = 0
    calling: int | None = None
    attempt: int = 0
    step: str = ""
    number: int = 0
    raised: bool = False
    desynchronised: bool = False
    version: int = -1
    news: dict[str, Any] = field(default_factory=dict)
    awaited: Callable[[], str] | None = None
    waits_since_s: float | None = None
    has_warned: bool = False
    gave_up_on: tuple[tuple[int, str], ...] = ()
    turns: int = 0
    messages: int = 0
    exchanging: bool = False
    _talking: set[int] = field(default_factory=set)
    _has_told_place: bool = False
    _phase: int = status_of.IDLE
    _thread: int = 0
    _said: bool = False

    def begin(self, step: str, number: int) -> None:
        """Note that a call of a step begins."""
        if self.raised:
            self.raised = False
            self.monitor.command(do="clear", group=self.key)
        self.calling, self.step, self.number = self.calls + 1, step, number
        self.attempt += 1
        self._thread = threading.get_ident()
        self._phase = status_of.CALLING
        self.monitor.status.say(self._phase, number, step)

    def starts_message(self, counts: bool) -> int:
        """A message is about to start; returns its number, from 1 on, or 0 if it does not count."""
        self._talking.add(threading.get_ident())
        self.messages += counts
        return self.messages if counts else 0

    def takes_turn(self, turns: int) -> None:
        """It has taken a turn in exchanges: so many by now."""
        self._talking.add(threading.get_ident())
        self.turns = turns

    @contextlib.contextmanager
    def in_exchange(self) -> Iterator[None]:
        """This rank waits for others in an exchange, whose turn was the last one."""
        self.exchanging = True
        try:
            yield
        finally:
            self.exchanging = False

    def tell_place(self, message: int, what: str) -> None:
        """Tell where this rank waits for others, if that is known.

        Args:
            message: the number of the message that it waits for; 0 if it waits for none.
            what: it waits in; of a message its kind, the same on all ranks.
        """
        # Where several threads talk to other ranks, there is no order in which they do.
        if self._talking != {threading.get_ident()} or not (message or self.exchanging):
            return
        kind = what if message else ""
        if self.is_calling_here:
            what = f"call {self.number} of step {self.step!r}" + (f", in {what}" if not message else "")
        place = PlaceOfWait(kind, self.turns, message or self.messages, self.rank, shortened(what, TEXT_BYTES))
        self._has_told_place = True
        self.monitor.command(do="waits", group=self.key, place=place.as_json())

    def prepares(self, whether: bool) -> None:
        """Whether the call that is under way traces, or compiles: its messages come later."""
        self._phase = status_of.PREPARING if whether else status_of.CALLING
        self.monitor.status.say(self._phase, self.number, self.step)

    def messages_are_there(self) -> None:
        """Note that all messages of the call are complete: from now on no other rank waits for it."""
        if self.calling is not None:
            self.calls, self.attempt = self.calling, 0

    def end(self, error: BaseException | None) -> None:
        """Note that the call has ended."""
        left, self.calling, self.awaited = self.calling, None, None
        if error is not None and left is not None and left > self.calls:
            if self.desynchronised:
                self._is_out(error)
            elif not isinstance(error, PeerError):
                self.raised = True
                text = text_of(error)
                self.monitor.command(do="raised", group=self.key, text=text, call=left, attempt=self.attempt)
        self._phase = status_of.IDLE
        self.monitor.status.say(self._phase, self.number, self.step)

    def _is_out(self, error: BaseException) -> None:
        """Report that this rank cannot go on to the others, which may wait for it."""
        if self._said:
            return
        self._said = True
        if isinstance(error, PeerError):
            reason, text = "left", "it is desynchronised"
            self.gave_up_on = tuple((rank, error.reason) for rank in error.ranks)
        else:
            reason, text = "raised", text_of(error)
        self.monitor.command(
            do="leave", group=self.key, reason=reason, text=text, calls={self.key: self.calls},
            because={self.key: self.gave_up_on},
        )  # fmt: skip

    @property
    def is_calling_here(self) -> bool:
        """Whether a call of a step is under way in this thread, and not in another one."""
        return self.calling is not None and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this rank waits for others meanwhile."""
        self.wait_begins()
        try:
            yield
        finally:
            self.wait_ends()

    def wait_begins(self) -> None:
        """This rank waits for others."""
        if self.calling is not None and not self.is_calling_here:
            return  # a thread beside the one that trains
        self.waits_since_s = time.monotonic()
        self.monitor.status.say(status_of.WAITING, self.number, self.step)

    def wait_ends(self) -> None:
        """Note that it does not wait any more."""
        if self.calling is not None and not self.is_calling_here:
            return
        self.waits_since_s = None
        self.monitor.status.say(self._phase, self.number, self.step)
        if self._has_told_place:
            self._has_told_place = False
            self.monitor.command(do="waits", group=self.key, place=None)

    @property
    def has_news(self) -> bool:
        """Whether the monitor has heard something that was not read yet, or that is of faults."""
        known = self.news
        return self.monitor.status.version != self.version or bool(known.get("story") or known.get("mismatch"))

    def _read(self) -> dict[str, Any]:
        version = self.monitor.status.version
        if version != self.version:
            news = self.monitor.status.news()
            if news is not None:
                self.version, self.news = version, news.get(self.key, {})
        return self.news

    def faults(self, believing: bool) -> list[Fault]:
        """The faults of other ranks, causes first, and otherwise in the order in which they were noticed.

        Args:
            believing: whether to believe what is only suspected, since this rank has waited for some time.
        """
        return self._believed(believing, self._waits_in)

    def faults_begun(self, believing: bool) -> list[Fault]:
        """As `faults`, with those of calls that this rank has begun, or made: a device may still wait in them."""
        begun = self.calls if self.calling is None else self.calling
        return self._believed(believing, lambda fault: fault.call is not None and fault.call <= begun)

    def _believed(self, believing: bool, counts: Callable[[Fault], bool]) -> list[Fault]:
        """The faults of other ranks that are final, or that count."""
        faults = [Fault.from_json(each) for each in self._read().get("story", ())]
        others = [fault for fault in order_by_cause(faults) if fault.rank != self.rank]
        believed = [
            fault for fault in others if (believing or not fault.suspected) and (fault.call is None or counts(fault))
        ]
        return with_causes(believed, others)

    def _waits_in(self, fault: Fault) -> bool:
        """Whether this rank is in the same call in which another one raised and then went on.

        If this one is in a later attempt at the call, it raised in the one before, too: the other one is on its way.
        """
        return fault.call == self.calling and fault.attempt >= self.attempt and self.is_calling_here

    def mismatch(self) -> list[PlaceOfWait]:
        """Two places in which ranks wait for each other for good; none if there are no such."""
        return [PlaceOfWait.from_json(each) for each in self._read().get("mismatch", ())]

    def busy(self) -> list[tuple[int, str, float]]:
        """Ranks that do not wait for others: which, what they do, and since how many seconds; the longest first."""
        return [(rank, text, age_s) for rank, text, age_s in self._read().get("busy", ())]

    def unreached(self) -> list[tuple[int, str, str]]:
        """Ranks whose monitors this one's never reached: the rank, its addresses, and the reason."""
        return [(rank, where, why) for rank, where, why in self._read().get("unreached", ())]


def described_status(watched: Watched) -> str:
    """What this rank is doing, in words."""
    what, call, text, _ = watched.monitor.status.doing()
    return status_of.activity_text(what, call, text)


def text_of(error: BaseException) -> str:
    """An error in one line, short enough for messages of monitors."""
    return shortened(f"{type(error).__name__}: {first_line(error)}", TEXT_BYTES)


def age(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> age(12.3), age(400)
        ('12 s', '6 min 40 s')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
