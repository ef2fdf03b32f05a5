"""Threads beside the one that trains, which have to be out of torch when the interpreter ends.

Relied on in Python before 3.14: a daemon thread that comes back from C++ while the interpreter ends is unwound, and
C++ ends the whole process with SIGABRT ("terminate called without an active exception"). So the end waits for them.
"""

from __future__ import annotations

import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable

_WAITS_S = 5.0
"""So long a process that ends waits for its threads; what then waits for other ranks still does not come back soon."""

_DROPS_S = 0.05
"""So long it waits for gloo's threads to drop the tensors of the last messages, for which they take the lock of the
interpreter as well. They are done with that in microseconds, unless other work has the processor."""

AFTER_LEAVING = 50
"""The exit priority of that wait: lower than of what tells threads to end, which comes before."""

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_waits_in: set[int] = set()


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that may spend long in torch; the end of the process waits for it, but not for ever.

    Args:
        work: what it does.
        name: of the thread, for debuggers.

    Returns:
        The thread. When the process ends it is waited for, for some seconds.
    """
    thread = threading.Thread(target=work, name=f"fdp: {name}", daemon=True)
    thread.start()
    _running.add(thread)
    if os.getpid() not in _waits_in:  # a child by fork has no thread of its parent
        _waits_in.add(os.getpid())
        multiprocessing.util.Finalize(None, _wait_for_all, exitpriority=AFTER_LEAVING)
    return thread


def _wait_for_all() -> None:
    end_s = time.monotonic() + _WAITS_S
    for thread in list(_running):
        thread.join(max(0.0, end_s - time.monotonic()))
    time.sleep(_DROPS_S)
