"""Waiting for other ranks: in pieces, asking the monitor between them, so that no wait is endless."""

from __future__ import annotations

import ctypes
import datetime
import logging
import math
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from fdp.distributed.liveness.fault import Fault, with_causes
from fdp.distributed.liveness.unreached import warn_of_unreached
from fdp.distributed.liveness.watch import liveness_s, watched_ranks
from fdp.distributed.liveness.watched import Watched, age
from fdp.errors import AgreementError, PeerError, build_message

_PIECE = datetime.timedelta(seconds=0.25)

_SETTLES_S = 0.3
"""So long after the first news, others of the same cause may come: two ranks of one machine."""

_TOGETHER_S = 0.25
"""What is noticed within this time has one cause; no rank raises, and ends, so soon after the first news."""

_BELIEVES_S = 2.0
"""After so long a rank that waits believes what is only suspected: it has not heard of the others itself."""

_GRACE_S = 1.0
"""So long a rank that raised in this call is waited for: the same error may be about to be raised here."""

_ARRIVES_S = 10.0
"""So long what is missing may still be on its way, though a rank has left: it has been through this call."""

_EXPLAINS_S = 3.0
"""So long a failed message waits for news of who is gone."""

_GAP_S = 3.0
"""Who did not look for so long was stopped, perhaps with all others: what is known of them may be out of date."""

_WARNS_S = 30.0
"""After so long, and again each time that it has doubled, there is a warning that says who is waited for."""

_TELLS_PLACE_S = 2.0
"""After so long a rank tells where it waits: others may wait for it somewhere else."""

_REMEDIES = {
    "died": "look for the first error among the logs of these ranks, and whether the system ran out of memory. Start "
    "the job again from its last checkpoint.",
    "frozen": "the process was stopped by a signal (SIGSTOP, Ctrl-Z) or by a debugger. Start the job again from its "
    "last checkpoint. A larger FDP_LIVENESS_S waits longer.",
    "raised": "fix the error on these ranks. Start the job again from its last checkpoint.",
    "left": "let every rank call the same steps equally often (fdp.join, for uneven data), and destroy the process "
    "group together.",
    "unreachable": "look at the machines of these ranks, and at the network between them and this one. Start the job "
    "again from its last checkpoint.",
}

logger = logging.getLogger("fdp")


class Patience:
    """One wait of this rank for others.

    Args:
        watched: the ranks.
        what: what it waits in, such as "a message".
        message: the number of the message that it waits for; 0 for another kind of wait.
    """

    def __init__(self, watched: Watched, what: str, message: int = 0) -> None:
        self._watched, self._what, self._message = watched, what, message
        self._has_told = False
        self._begun_s = self._looked_s = time.monotonic()
        # Two heartbeats and a little more: by then the monitor knows if the rank runs again.
        self._thaws_s = 0.5 * liveness_s() + 0.5
        self._news_s: float | None = None
        self._warns_s, self._says_s = _WARNS_S, liveness_s()

    def look(self) -> None:
        """Ask the monitor, between two pieces of the wait.

        Raises:
            PeerError: another rank will not come.
            AgreementError: ranks wait for each other in different places.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > _GAP_S:
            self._begun_s = now_s
        self._looked_s = now_s
        waited_s = now_s - self._begun_s
        refuse_different_places(self._watched)
        if waited_s >= _TELLS_PLACE_S and not self._has_told:
            self._has_told = True
            self._watched.tell_place(self._message, self._what)
        faults = self._faults(waited_s)
        if not faults:
            self._news_s = None
        elif self._news_s is None:
            self._news_s = now_s
        elif now_s - self._news_s >= _SETTLES_S:
            raise peer_error(self._watched, faults, self._what)
        warn_of_unreached(self._watched)
        if waited_s >= self._says_s:
            level = logging.WARNING if waited_s >= self._warns_s else logging.INFO
            self._says_s = self._warns_s if level == logging.INFO else 2 * waited_s
            logger.log(level, "fdp: %s", waiting_text(self._watched, self._what, waited_s))

    def _faults(self, waited_s: float) -> list[Fault]:
        known = self._watched.faults(believing=waited_s >= _BELIEVES_S)
        return with_causes([fault for fault in known if waited_s >= self._patience_with(fault)], known)

    def _patience_with(self, fault: Fault) -> float:
        """Seconds that are waited before a fault is believed."""
        if fault.call is not None:
            return _GRACE_S
        if fault.reason == "frozen":
            return self._thaws_s
        calling = self._watched.calling
        if fault.reason == "left" and calling is not None and fault.calls >= calling:
            return _ARRIVES_S
        return 0.0


def finish(work: dist.Work, group: dist.ProcessGroup | None, what: str = "a message", number: int = 0) -> None:
    """Wait for a message.

    Args:
        work: what the backend made; its `wait` blocks until the message is there.
        group: the process group.
        what: it is, for errors.
        number: of the message among those of this rank; 0 if it is not known.

    Raises:
        PeerError: another rank will not come.
        AgreementError: ranks wait for each other in different places.
        RuntimeError: the backend failed, and it is not known why.
    """
    watched = watched_ranks(group)
    if watched is None or group is None:
        work.wait()
        return
    try:
        if _came(work, group, what):
            return
        with watched.waiting():
            patience = Patience(watched, what, number)
            while not _came(work, group, what):
                patience.look()
    except BaseException:
        if not work.is_completed():
            never_delete(group)
        raise


def never_delete(group: dist.ProcessGroup) -> None:
    """Keep a process group for as long as the process lives, and beyond.

    gloo's waits for all messages when it is deleted, and this one never comes: the process would not end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _came(work: dist.Work, group: dist.ProcessGroup | None, what: str) -> bool:
    """Wait for a piece of time; returns whether the message has arrived."""
    try:
        work.wait(_PIECE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False  # the piece has run out; the work goes on, and can be waited for again
    try:
        work.wait()  # it may have come between the two: this returns at once, with what it ended in
    except RuntimeError as error:
        explained = explain(group, what)
        if explained is None:
            raise
        raise explained from error
    return True


def until(
    come: Callable[[], bool],
    group: dist.ProcessGroup | None,
    timeout_s: float,
    what: str,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait for something other than a message; returns whether it came in time.

    Args:
        come: whether it is there.
        group: the process group that has to do with it, or None.
        timeout_s: seconds to wait.
        what: is waited in, for errors.
        pause: waits for some seconds, or until it has come.

    Raises:
        PeerError: another rank will not come.
    """
    watched = watched_ranks(group)
    end_s, pause_s = time.monotonic() + timeout_s, 0.001
    patience: Patience | None = None
    try:
        while not come():
            now_s = time.monotonic()
            if now_s >= end_s:
                return False
            if watched is not None and pause_s >= 0.05:
                if patience is None:
                    patience = Patience(watched, what)
                    watched.wait_begins()
                patience.look()
            pause(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return True
    finally:
        if patience is not None and watched is not None:
            watched.wait_ends()


def refuse_gone(watched: Watched) -> None:
    """Refuse to begin something that other ranks cannot take part in, before anything is changed.

    Raises:
        PeerError: some will not.
        AgreementError: they wait for each other in different places.
    """
    if watched.has_news:
        refuse_different_places(watched)
        warn_of_unreached(watched)
        known = watched.faults(believing=False)
        final = [fault for fault in known if fault.call is None and fault.reason != "frozen"]
        if final:
            raise peer_error(watched, with_causes(final, known), "")


def refuse_different_places(watched: Watched) -> None:
    """Refuse to wait any longer where ranks wait for each other in different places.

    Raises:
        AgreementError: they do; names both.
    """
    if (error := _different_places(watched)) is not None:
        raise error


def _different_places(watched: Watched) -> AgreementError | None:
    if not (places := watched.mismatch()):
        return None
    return AgreementError(
        build_message(
            f"rank {watched.rank} cannot go on: ranks wait for each other in different places.",
            [f"rank {place.rank} waits in {place.text}" for place in places],
            remedy="call the same functions in the same order on every rank, with arguments and settings of the same "
            "kinds. Start the job again from its last checkpoint.",
        )
    )


def explain(group: dist.ProcessGroup | None, what: str) -> PeerError | AgreementError | None:
    """After the backend failed: who is gone, or waits elsewhere, if that becomes known soon; None otherwise."""
    watched = watched_ranks(group)
    if watched is None:
        return None
    begun_s, news_s = time.monotonic(), math.inf
    while True:
        now_s = time.monotonic()
        if (elsewhere := _different_places(watched)) is not None:
            return elsewhere
        faults = watched.faults_begun(believing=True)
        if faults:
            news_s = min(news_s, now_s)
            if now_s - news_s >= _SETTLES_S:
                return peer_error(watched, faults, what)
        elif now_s - begun_s >= _EXPLAINS_S:
            return None
        time.sleep(0.05)


def known_loss(group: dist.ProcessGroup | None, what: str, believing: bool) -> PeerError | None:
    """The error for ranks that are known to be lost by now, or, if that is believed, suspected; None if none is."""
    watched = watched_ranks(group)
    faults = [] if watched is None else watched.faults_begun(believing)
    return peer_error(watched, faults, what) if watched is not None and faults else None


def peer_error(watched: Watched, faults: Sequence[Fault], what: str) -> PeerError:
    """The error for lost ranks.

    Args:
        watched: the ranks.
        faults: what became of them, the first first.
        what: this rank waits in; empty if it has not begun to.
    """
    first = faults[0]
    reason = first.reason
    # Of silence it is noticed now here, now there. Who died or left later may have done so for want of the first.
    latest_s = math.inf if reason == "unreachable" else first.after_s + _TOGETHER_S
    of_it = [fault for fault in faults if fault.reason == reason and fault.after_s <= latest_s]
    named = {fault.rank for fault in faults}
    roots = [fault for fault in of_it if not any(rank in named for rank, _ in fault.because)]
    of_it = sorted(roots or of_it, key=lambda fault: fault.rank)
    ranks = tuple(fault.rank for fault in of_it)
    details = tuple(f"rank {fault.rank} {_said(fault)}" for fault in of_it)
    call = watched.number if watched.is_calling_here else 0
    who = f"rank {watched.rank}" if not call else f"call {call} of step {watched.step!r} on rank {watched.rank}"
    lines, remedy = list(details), _REMEDIES[reason]
    if what:
        lines.append(f"it was waited for in {watched.awaited() if call and watched.awaited is not None else what}")
        remedy += " Donated state may be half updated." if call else ""
    gone = "another rank" if len(ranks) == 1 else f"{len(ranks)} other ranks"
    heading = f"{who} cannot go on: {gone} will not come."
    return PeerError(build_message(heading, lines, remedy=remedy), ranks, reason, call, details)


def waiting_text(watched: Watched, what: str, waited_s: float) -> str:
    """One line that names the ranks that this one waits for."""
    where = f", in call {watched.number} of step {watched.step!r}" if watched.is_calling_here else ""
    if where and watched.awaited is not None:
        what = watched.awaited()
    busy = [(rank, text, age_s) for rank, text, age_s in watched.busy() if rank != watched.rank]
    who = "; ".join(f"rank {rank}, for {age(age_s)} {text}" for rank, text, age_s in busy)
    others = f" Not waiting: {who}." if who else " It is not known for whom."
    return f"rank {watched.rank} has waited for {age(waited_s)} in {what}{where}.{others}"


def _said(fault: Fault) -> str:
    said = {
        "died": "died", "frozen": "is frozen", "raised": "raised", "left": "left", "unreachable": "cannot be reached",
    }[fault.reason]  # fmt: skip
    return f"{said}: {fault.text}" if fault.text else said
