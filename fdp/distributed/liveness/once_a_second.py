"""What a thread looks at once a second for each watched group: whether it is still there, and what a device waits for.

- A group that was destroyed may live on as an object: the program may refer to it, and so does NCCL.
- Waiting for messages of a device, such as those of NCCL, blocks no thread that could ask the monitor.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist

from fdp.distributed.liveness.threads import start_thread
from fdp.distributed.liveness.watch import leave
from fdp.distributed.liveness.watched import Watched

_LOOKS_S = 1.0
_GIVES_UP_S = 5.0
"""So long after a rank is known to be gone the messages of a device are ended; until then it may be done with them."""


class _Looked:
    """A group that is looked at."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        watched: Watched,
        is_destroyed: Callable[[dist.ProcessGroup], bool],
        aborts: bool,
    ) -> None:
        self._group, self._watched = weakref.ref(group), watched
        self._is_destroyed, self._aborts, self._seen_s = is_destroyed, aborts, 0.0

    def look(self) -> bool:
        """Look; returns whether to look again."""
        group = self._group()
        if group is None:
            return False
        if self._is_destroyed(group):
            leave(self._watched)
            return False
        if self._aborts:
            self._seen_s = self._seen_s + _LOOKS_S if self._watched.faults_begun(believing=False) else 0.0
            if self._seen_s > _GIVES_UP_S:
                self._aborts = False
                with contextlib.suppress(Exception):  # it may have ended otherwise
                    group.abort()
        return True


_looked: list[_Looked] = []
_thread: threading.Thread | None = None
_starting = threading.Lock()


def look_after(
    group: dist.ProcessGroup, watched: Watched, is_destroyed: Callable[[dist.ProcessGroup], bool], aborts: bool
) -> threading.Thread | None:
    """Look after a process group from now on.

    If it is destroyed, the other ranks are told that this one has left. If another rank is gone, or has raised in a
    call that this one has begun, messages of a device are aborted after some seconds: then whoever waits for the device
    goes on, and the next call of a step says who is gone.

    Args:
        group: the process group; it is not kept alive.
        watched: its ranks.
        is_destroyed: says so of a group.
        aborts: whether it has messages of a device.

    Returns:
        The thread that looks, once a second; None if the system has no more threads.
    """
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _looked.clear()  # those of a monitor that has ended, or of the process that this one is a forked copy of
            closing = watched.monitor.closing
            try:
                _thread = start_thread(lambda: _look_at_all(closing), "looks after groups")
            except RuntimeError:  # others hear of this rank when its process ends
                return None
        _looked.append(_Looked(group, watched, is_destroyed, aborts))
        return _thread


def _look_at_all(closing: threading.Event) -> None:
    while not closing.wait(_LOOKS_S):
        for looked in list(_looked):
            if not looked.look():
                with _starting:
                    _looked.remove(looked)
