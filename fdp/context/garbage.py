"""Python's garbage collector, switched off where it would find nothing and take long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch the garbage collector off while many objects are made that stay, or that are freed by reference counts.

    A full collection scans all objects of the process, including those of torch and of the trace, and would run again
    and again while a trace is made. The next collection finds what became garbage meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
