"""Which ranks are desynchronised, and that one step at a time runs on a group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fdp.distributed.group import Group, destroyed
from fdp.distributed.liveness.patience import refuse_gone
from fdp.distributed.liveness.watch import watched_ranks
from fdp.distributed.sending import watch_over
from fdp.errors import AgreementError, PeerError, build_message

_left_behind: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def mark_desynchronised(group: Group, why: str) -> None:
    """Mark this rank as desynchronised: it left a step in the middle, and the others are still in it."""
    if group.process_group is not None:
        _left_behind.setdefault(group.process_group, why)
        if (watched := watched_ranks(group.process_group)) is not None:
            watched.desynchronised = True


_doubts: weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[], str | None]] = weakref.WeakKeyDictionary()


def doubt(group: Group, find_out: Callable[[], str | None]) -> None:
    """Mark this rank as perhaps desynchronised. Before its next message `find_out` returns the reason, or None.

    `find_out` may wait for the other ranks, so it is called later: a generator that is being closed cannot wait, and a
    process that is ending should not.
    """
    if group.process_group is not None:
        _doubts[group.process_group] = find_out


def why_desynchronised(group: Group) -> str | None:
    """Why this rank is desynchronised from the others of a group; None if it is not."""
    if group.process_group is None:
        return None
    find_out = _doubts.pop(group.process_group, None)
    if find_out is not None and (why := find_out()) is not None:
        mark_desynchronised(group, why)
    return _left_behind.get(group.process_group)


def refuse_desynchronised(group: Group, what: str) -> None:
    """Refuse to send a message that would meet another one.

    Args:
        group: the ranks.
        what: who is about to talk to them.

    Raises:
        PeerError: this rank is desynchronised.
    """
    if (why := why_desynchronised(group)) is not None:
        raise PeerError(
            build_message(
                f"{what} was called on a process group whose ranks are desynchronised.",
                [why],
                remedy="let the error end this process; the other ranks wait in what was left. Start the job again "
                "from its last checkpoint.",
            )
        )


def carry_out(what: str, group: Group, start: Callable[[], Callable[[], None]]) -> None:
    """Send a message outside of steps, and wait for it. A rank that leaves it in the middle is desynchronised.

    Args:
        what: sends it, for errors.
        group: the ranks.
        start: starts it; returns the function that waits for it.

    Raises:
        PeerError: this rank is desynchronised, or another one will not come.
    """
    whole = group.watched  # of a mesh, all ranks: no message along another dimension is paired rightly either
    refuse_desynchronised(whole, what)
    is_sent = False
    try:
        wait = start()
        is_sent = True
        wait()
    except BaseException as error:
        # An argument that cannot be sent is refused on all ranks alike. What a signal interrupts may have been sent.
        if is_sent or not isinstance(error, Exception):
            mark_desynchronised(whole, f"{what} was left in the middle by {type(error).__name__}")
        raise


_busy: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[threading.Lock, list[str]]] = weakref.WeakKeyDictionary()


@contextmanager
def alone_on(group: Group, name: str, call: int = 0) -> Iterator[None]:
    """Run step `name` as the only one on its group: messages carry no name, ranks pair them by their order.

    Args:
        group: the ranks.
        name: of the step.
        call: which call of it this is, from 1 on.

    Raises:
        ArgumentError: the process group has been destroyed.
        PeerError: another rank is gone. Or another step, or another call of this one, is running on the group: the
            other ranks may have run the two one after the other, so this rank counts as desynchronised.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        yield
        return
    lock, running = _busy.get(process_group) or _busy.setdefault(process_group, (threading.Lock(), []))
    if not lock.acquire(blocking=False):
        other = next(iter(running), name)
        mark_desynchronised(group, f"step {name!r} was called while step {other!r} was running")
        raise PeerError(
            build_message(
                f"step {name!r} was called on rank {group.rank} while step {other!r} was running on the same process "
                "group.",
                ["from another thread, or from inside of that run", "ranks pair their messages by their order alone"],
                remedy="let one thread call all steps of a group, one after the other; or make a group for each "
                "thread with torch.distributed.new_group. Start the job again from its last checkpoint.",
            )
        )
    running.append(name)
    try:
        watched = watch_over(group)
        if watched is None:
            yield
            return
        watched.begin(name, call)
        try:
            if not watched.desynchronised:  # otherwise that is the reason that is given
                refuse_gone(watched)
            yield
        except BaseException as error:
            # What other ranks say of a group that this one has destroyed, too, would hide the line to correct.
            own = destroyed() if isinstance(error, (PeerError, AgreementError)) and not group.exists else error
            watched.end(own)
            if own is not error:
                raise own from error
            raise
        watched.end(None)
    finally:
        running.clear()
        lock.release()
