"""Memory that is filled with garbage: what is read before it is written, or after it was let go of, is not a number.

fdp's blocks of memory are filled with NaN after each call. Memory of the allocator is filled by glibc itself, when it
is handed out (with 0x7f: large numbers) and when it comes back (with 0x80).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

import torch

from fdp.runtime.arena import ARENAS

_PERTURB = 0x80
_M_PERTURB = -6


def fill_freed_memory() -> None:
    """From now on memory is filled as it is handed out, and as it comes back, where the C library is glibc.

    glibc caches small pieces unchanged, unless an option at the start of the process forbids it. `make fuzz` sets that
    option, by GLIBC_TUNABLES.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_PERTURB, _PERTURB)


def fill_blocks() -> int:
    """Overwrite the blocks of steps that are not running now; returns their number of bytes."""
    count = 0
    for reference in list(ARENAS._idle):
        arena = reference()
        for block in {} if arena is None else arena.blocks.values():
            block.fill_(255)
            count += block.numel()
    return count


def works() -> bool:
    """Whether memory that is handed out is filled."""
    return bool((torch.empty(4096, dtype=torch.uint8) == (_PERTURB ^ 0xFF)).all())
