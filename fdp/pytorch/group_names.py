"""Names of process groups that some ranks make without the others.

Ranks find each other in the store by the name of their new group. For a group that its members alone make, torch's name
depends on what else a rank has made: in 2.13 on the number of groups that it is in, from 2.14 on the number of groups
that it has made. From 2.14 it also raises that number, on members alone, and the next group of all ranks is named by
it. Then ranks look for each other under two names, and wait until the time limit. So fdp names its groups itself.

This relies on `distributed_c10d._process_group_name(ranks, use_hashed_name)`, which `new_group` asks for a name once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d

from fdp.pytorch.parts import require, unsupported_torch

_WHAT = "a process group of some ranks"


class _Given(threading.local):
    """The name of the group that this thread makes."""

    name: str | None = None


_given = _Given()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the next process group that this thread makes a name.

    Args:
        name: the same on all members, and new to the store.

    Raises:
        FdpError: torch did not ask for the name.
    """
    _ask_here_first()
    _given.name = name
    try:
        yield
        if _given.name is not None:
            raise unsupported_torch(_WHAT, ["new_group does not ask distributed_c10d._process_group_name"])
    finally:
        _given.name = None


@functools.cache
def _ask_here_first() -> None:
    """Let torch ask here for names, from now on; all others are torch's own."""
    require(_WHAT)
    torchs_own: Callable[..., Any] = distributed_c10d._process_group_name

    @functools.wraps(torchs_own)
    def name_of(*args: Any, **kwargs: Any) -> Any:
        name, _given.name = _given.name, None
        return torchs_own(*args, **kwargs) if name is None else name

    distributed_c10d._process_group_name = name_of
