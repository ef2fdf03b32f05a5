"""Python's search for cycles of objects that nobody holds, switched off where it finds nothing and takes long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave out the search for garbage while many objects are made that stay, or that go by themselves.

    A full search looks at all objects of the process, those of torch and of the trace included, and would come again
    and again while those of a trace are made. What became garbage meanwhile is found by the next search.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
