"""Monitors find each other through the store of the group: each rank writes where its own is, and reads of its
neighbours in the tree.

The store may die before that, with the rank that holds it. Then its clients know which rank is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid

import torch.distributed as dist

from fdp.distributed.liveness.addresses import host_name, own_addresses
from fdp.distributed.liveness.own_monitor import OwnMonitor
from fdp.distributed.liveness.threads import start_thread
from fdp.distributed.liveness.tree import children_of, parent_of

_SOON_S = 60.0
"""So long ranks look often: until most have made their first call."""

_LOOKS_S = 1.0
"""Later they look this often."""

_CHECKS_PER_S = 4000
"""Of a store by all ranks together, about, in the beginning; of few ranks each looks twenty times a second."""

_TRUTH_S = 1.0
"""So long the monitor of a rank that is gone may take to say itself what became of it."""

_held_by_rank_0: set[tuple[str, int]] = set()


def is_held_by_rank_0(store: dist.TCPStore) -> None:
    """Note that rank 0 of all ranks holds a store, and no other process."""
    _held_by_rank_0.add((str(store.host), int(store.port)))


def innermost(store: dist.Store) -> dist.Store:
    """The store behind prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def held_by(store: dist.Store, group: dist.ProcessGroup) -> int | None:
    """The rank in a group that holds its store; None if that is not known, or if it is no rank of the group."""
    store = innermost(store)
    if not isinstance(store, dist.TCPStore):
        return None
    members = dist.get_process_group_ranks(group)
    return members.index(0) if (str(store.host), int(store.port)) in _held_by_rank_0 and 0 in members else None


def monitored_group_name(store: dist.Store, name: str, rank: int) -> str | None:
    """The name of a group in messages of monitors: the same on all ranks, another one when a group is made anew.

    Args:
        store: of the group.
        name: of the group.
        rank: of this process in it.

    Returns:
        The name; None if the store is gone.
    """
    # Of several machines each counts its own failures.
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    attempt = "" if several else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        base = f"{name}/{attempt}/{store.add(f'fdp/liveness/{name}/{attempt}/{rank}', 1)}"
        # A store made anew counts anew. Without a number that is drawn, who lets go of an old group would leave its
        # successor. The rank that comes first draws the number for all.
        return f"{base}/{store.compare_set(f'fdp/liveness/{base}/drawn', '', uuid.uuid4().hex).decode()}"
    except (RuntimeError, dist.DistError):
        return None


class Introduction:
    """Connects the monitor of this rank with its neighbours, in a thread: other ranks may come much later.

    What this rank says of itself is in the store when this returns, so that who hears of it at all can find it.

    Args:
        monitor: of this rank.
        key: of the group.
        rank: of this process in it.
        size: number of ranks.
        store: of the group.
        holder: the rank that holds the store; None if that is not known.
    """

    def __init__(
        self, monitor: OwnMonitor, key: str, rank: int, size: int, store: dist.Store, holder: int | None
    ) -> None:
        self._monitor, self._key, self._store = monitor, key, store
        self._holder, held = holder if holder != rank else None, innermost(store)
        self._address = (str(held.host), int(held.port)) if isinstance(held, dist.TCPStore) else ("", 0)
        self._ending = threading.Event()
        own = {"addresses": own_addresses(), "port": monitor.port, "token": monitor.token, "host": host_name()}
        with contextlib.suppress(RuntimeError, dist.DistError):  # the thread sees that, too
            store.set(self._name(rank), json.dumps(own))
        parent = parent_of(rank)
        self._missing = [*([] if parent is None else [parent]), *children_of(rank, size)]
        self._pause_s = min(max(0.05, size / _CHECKS_PER_S), _LOOKS_S)
        self._thread = start_thread(self._run, "ranks meet")

    @property
    def is_over(self) -> bool:
        """Whether it looks no more."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Read the store a last time, because the rank leaves; wait for a limited time."""
        self._ending.set()
        self._thread.join(timeout_s)

    def _name(self, rank: int) -> str:
        return f"fdp/liveness/{self._key}/at/{rank}"

    def _run(self) -> None:
        try:
            self._look_until_all_are_there()
        except (RuntimeError, dist.DistError):
            self._conclude()
        except (ValueError, KeyError, TypeError, OSError):  # what is in the store is nothing that a rank writes
            pass
        finally:
            del self._store  # it may be held by this process, and end with its last user

    def _look_until_all_are_there(self) -> None:
        begun_s, pause_s, is_last = time.monotonic(), 0.01, False
        while True:
            self._look()
            if is_last or not self._missing:
                return
            is_last = self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, self._pause_s if time.monotonic() - begun_s < _SOON_S else _LOOKS_S)

    def _look(self) -> None:
        for rank in list(self._missing):
            if self._store.check([self._name(rank)]):
                found = json.loads(self._store.get(self._name(rank)))
                self._missing.remove(rank)
                self._monitor.command(do="neighbour", group=self._key, rank=rank, **found)

    def _conclude(self) -> None:
        """Handle a failed store. If nothing listens at its address, the process that held it has ended."""
        if self._holder is None or self._ending.wait(_TRUTH_S):
            return
        if not _is_refused(*self._address):
            return
        text = "the store that it held is gone"
        self._monitor.command(do="conclude", group=self._key, rank=self._holder, text=text)


def _is_refused(host: str, port: int) -> bool:
    """Whether a machine says that no process listens at a port."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
