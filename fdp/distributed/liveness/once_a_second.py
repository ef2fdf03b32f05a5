"""A thread that ends messages of devices, such as those of NCCL: waiting for them blocks no thread that could ask the
monitor."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from fdp.distributed.liveness.threads import start_thread
from fdp.distributed.liveness.watched import Watched

_LOOKS_S = 1.0
_GIVES_UP_S = 5.0
"""So long after a rank is known to be gone the messages of a device are ended; until then it may be done with them."""


def abort_when_ranks_are_gone(group: Any, watched: Watched) -> threading.Thread:
    """Abort a process group when another rank is gone, so that whoever waits for the device goes on.

    The next call of a step then says who is gone.

    Args:
        group: the process group; it is not kept alive.
        watched: its ranks.

    Returns:
        The thread that looks, once a second.
    """
    reference = weakref.ref(group)

    def look() -> None:
        seen_s = 0.0
        while not watched.monitor.closing.wait(_LOOKS_S):
            if reference() is None:
                return
            gone = [fault for fault in watched.faults(believing=False) if fault.call is None]
            seen_s = seen_s + _LOOKS_S if gone else 0.0
            if seen_s > _GIVES_UP_S:
                with contextlib.suppress(Exception):  # it may have ended otherwise
                    reference().abort()  # type: ignore[union-attr]
                return

    return start_thread(look, "ends messages of devices")
