"""The rank's side of the watch: starts the monitor, and finds the groups that it watches.

Relied on in torch: nothing private. Where ranks find each other's monitors is written into the store of the group.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing.util
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fdp.distributed.liveness.introduction import Introduction, held_by, innermost, monitored_group_name
from fdp.distributed.liveness.own_monitor import OwnMonitor
from fdp.distributed.liveness.watched import Watched, text_of
from fdp.errors import ArgumentError, PeerError, build_message, first_line

_FEWEST_S = 0.25
"""So long monitors that are well may be silent: with less, each would take the others for lost."""


def liveness_s() -> float:
    """Seconds after which a rank that is silent, or stopped, counts as lost: FDP_LIVENESS_S, or 10; 0 for never.

    Raises:
        ArgumentError: it is no finite number, negative, or less than a monitor needs to answer.
    """
    text = os.environ.get("FDP_LIVENESS_S", "10")
    seconds = math.nan
    with contextlib.suppress(ValueError):
        seconds = float(text)
    # With infinity no fault would ever be reported.
    if not (seconds == 0 or _FEWEST_S <= seconds < math.inf):
        raise ArgumentError(
            build_message(
                f"the environment has FDP_LIVENESS_S={text!r}.",
                remedy=f"set it to a finite number of seconds, {_FEWEST_S} or more, or to 0 to turn the watch off.",
            )
        )
    return seconds


_TELLS_S = 0.5
"""Seconds that a process may spend at its end to find the ranks that it has to inform."""

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Watched | None] = weakref.WeakKeyDictionary()
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups of the process that this one is a forked copy of, such as a worker of a data loader."""
_own: list[OwnMonitor] = []
_introductions: dict[str, Introduction] = {}
_starting = threading.Lock()


def all_watched() -> list[Watched]:
    """The groups whose ranks are watched."""
    return [watched for watched in _groups.values() if watched is not None]


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether `watch` was called for a group."""
    return group in _groups


def watched_ranks(group: dist.ProcessGroup | None) -> Watched | None:
    """What is known of the ranks of a group; None if they are not watched."""
    return None if group is None else _groups.get(group)


def has_met(group: dist.ProcessGroup) -> bool:
    """Whether this rank's monitor knows where those next to it are, or there is nothing to find out any more."""
    watched = watched_ranks(group)
    introduction = None if watched is None else _introductions.get(watched.key)
    return introduction is None or introduction.is_over


def watch(
    group: dist.ProcessGroup, name: str, rank: int, size: int, store_of: Callable[[], dist.Store]
) -> Watched | None:
    """Watch the ranks of a group from now on, and let them watch this one; other ranks may still be starting.

    Args:
        group: the group.
        name: the same on all ranks, and no other group's.
        rank: of this process in it.
        size: number of ranks.
        store_of: gives the store of the group.

    Returns:
        What is known of them; None if they are not watched: FDP_LIVENESS_S=0, a store that is not shared by processes,
        or no monitor could be started, of which there is a warning.

    Raises:
        ArgumentError: this process is a forked copy of the rank.
    """
    if group in _groups:
        return _groups[group]
    if group in _inherited:
        raise ArgumentError(
            build_message(
                f"process {os.getpid()} is a copy of rank {rank}, made by os.fork, and takes no part in its messages.",
                remedy="call collectives, steps and the like in the program itself, not in worker processes of a data "
                "loader.",
            )
        )
    with _starting:
        if group in _groups:
            return _groups[group]
        store, limit_s = store_of(), liveness_s()
        address = _address_of(store)
        # On other systems nothing here tells of a process what Linux does.
        if size < 2 or limit_s <= 0 or address is None or not sys.executable or sys.platform != "linux":
            _groups[group] = None
            return None
        try:
            if not _own or _own[0].pid != os.getpid():  # a child by fork has none
                _own[:] = [OwnMonitor(limit_s, everywhere=address not in ("127.0.0.1", "localhost", "::1"))]
                multiprocessing.util.Finalize(None, _leave, args=(_own[0],), exitpriority=100)
                sys.excepthook = functools.partial(_hear_of_uncaught, _own[0], sys.excepthook)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _groups[group] = None
            warnings.warn(
                f"fdp could not start the process that watches rank {rank}: {type(error).__name__}: {error}. A rank "
                "that stops is noticed when the process group's own time limit has passed. FDP_LIVENESS_S=0 avoids "
                "this warning.",
                stacklevel=2,
            )
            return None
        key, holder = monitored_group_name(store, name, rank), held_by(store, group)
        if key is None and holder is None:  # whoever needs the store next says that it is gone
            _groups[group] = None
            return None
        # Where the store is gone already, it is known with whom. There is no other rank to hear from.
        key = key or f"{name}/alone"
        # Before others can find it there.
        _own[0].command(do="join", group=key, rank=rank, size=size)
        introduction = Introduction(_own[0], key, rank, size, store, holder)
        made = _groups[group] = Watched(key, rank, size, _own[0])
        _introductions[key] = introduction
        weakref.finalize(group, _leave, made.monitor, key).atexit = False
        return made


def _inherit() -> None:
    """A copy says nothing in the name of the rank. What it waited for would never come."""
    _inherited.update(_groups)
    _groups.clear()


os.register_at_fork(after_in_child=_inherit)


def _address_of(store: dist.Store) -> str | None:
    """The address of what holds a store that several processes share; "" for a file, None for any other store."""
    store = innermost(store)
    if isinstance(store, dist.TCPStore):
        return str(store.host)
    return "" if isinstance(store, dist.FileStore) else None


def leave(watched: Watched) -> None:
    """Report that this rank has destroyed a group, which the program, or its backend, still refers to."""
    _leave(watched.monitor, watched.key)


def _leave(monitor: OwnMonitor, key: str | None = None) -> None:
    """Report that this rank leaves a group, or all groups as the process ends; and why."""
    if monitor.pid != os.getpid():
        return
    error: BaseException | None = None
    if key is None:
        monitor.closing.set()
        # The interpreter remembers it, even if a hook of the program's, such as Rich's, is in the place of fdp's.
        last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        error = sys.exc_info()[1] or monitor.uncaught or last
    reason, text = "left", "it has destroyed the process group" if key is not None else "its program has ended"
    if isinstance(error, SystemExit):
        text = f"its program has ended with exit code {first_line(error.code)}"
    elif error is not None and not isinstance(error, PeerError):
        reason, text = "raised", text_of(error)
    _say_why(monitor, key, reason, text)
    if key is not None:
        if key in _introductions:
            _introductions.pop(key).end(0.0)
        return
    # The store may end with this process: ranks that could not be informed yet have to be found now.
    end_s = time.monotonic() + _TELLS_S
    for introduction in list(_introductions.values()):
        introduction.end(max(0.0, end_s - time.monotonic()))


def _say_why(monitor: OwnMonitor, key: str | None, reason: str, text: str) -> None:
    """Send the monitor that this rank leaves a group, or all of them, with the reason."""
    calls = {watched.key: watched.calls for watched in all_watched()}
    because = {watched.key: watched.gave_up_on for watched in all_watched()}
    monitor.command(do="leave", group=key, reason=reason, text=text, calls=calls, because=because)


def _hear_of_uncaught(monitor: OwnMonitor, before: Callable[..., Any], kind: Any, error: Any, traceback: Any) -> None:
    """Report that the program ends with an error, before the interpreter waits for threads."""
    if monitor.pid == os.getpid() and not hasattr(sys, "ps1"):  # at a prompt, the program goes on
        monitor.uncaught = error
        if not isinstance(error, PeerError):
            _say_why(monitor, None, "raised", text_of(error))
    before(kind, error, traceback)
