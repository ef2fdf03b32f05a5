"""A rendezvous store for one process that claims to be many: what it says itself, all others have said as well."""

from __future__ import annotations

import datetime
import re
from typing import Any

import torch.distributed as dist


class MirrorStore(dist.Store):
    """A store in which ranks that do not exist have written what rank 0 has.

    Ranks exchange values under keys that end with their number: `turn/3/17` is what rank 17 says, and is answered by
    what is under `turn/3/0`. No question is answered before rank 0 itself has written.

    Example:
        >>> store = MirrorStore()
        >>> store.set("turn/3/0", "yes")
        >>> store.get("turn/3/17"), store.check(["turn/3/17"]), store.check(["turn/4/17"])
        (b'yes', True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()

    def set(self, key: str, value: Any) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Reads a value, and waits for it if need be."""
        return self._store.get(self._own(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several values."""
        return [self.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        """Adds to a number that no other process uses."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all of some values are there."""
        return self._store.check([self._own(key) for key in keys])

    def wait(self, keys: list[str], timeout: datetime.timedelta = datetime.timedelta(seconds=120)) -> None:
        """Waits for all of some values."""
        self._store.wait([self._own(key) for key in keys], timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Writes a value in place of an expected one."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Removes a value."""
        return self._store.delete_key(key)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long to wait for a value."""
        self._store.set_timeout(timeout)

    def _own(self, key: str) -> str:
        return key if self._store.check([key]) else re.sub(r"/\d+$", "/0", key)
