"""Shared memory of a rank and its monitor: what the rank does, and what the monitor has heard.

Writing takes less than a microsecond, and wakes no other process.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from typing import Any

IDLE, CALLING, PREPARING, WAITING, NEW = range(5)
"""What a rank does: its own code, a call of a step, preparing one, waiting for others; nothing yet."""

SIZE_BYTES = 2**18
"""Enough for the faults of many groups with all their texts. Memory that is never written takes no place."""

_DOING = struct.Struct("<BQQ")  # what, which call, since when (monotonic nanoseconds)
_TEXT_AT, _TEXT_BYTES = 32, 480
_NEWS_AT = 512
_NEWS = struct.Struct("<QI")  # which version (odd while it is written), length

ROOM_BYTES = SIZE_BYTES - _NEWS_AT - _NEWS.size
"""For what a monitor has heard."""


class Status:
    """The shared memory.

    Args:
        descriptor: of a file of `SIZE_BYTES`.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        self._text = ""

    # --- the rank says what it does ------------------------------------------------------------------------------

    def say(self, what: int, call: int, text: str) -> None:
        """Write what the rank does from now on.

        Args:
            what: `IDLE`, `CALLING`, `PREPARING` or `WAITING`.
            call: of which call, from 1 on.
            text: of what.
        """
        if text is not self._text:
            self._text = text
            encoded = text.encode(errors="backslashreplace")[:_TEXT_BYTES]
            self._memory[_TEXT_AT : _TEXT_AT + len(encoded) + 1] = encoded + b"\0"
        _DOING.pack_into(self._memory, 0, what, call, time.monotonic_ns())

    def doing(self) -> tuple[int, int, str, float]:
        """What the rank does: the kind, the call, the step, and since how many seconds."""
        what, call, since_ns = _DOING.unpack_from(self._memory, 0)
        text = self._memory[_TEXT_AT : _TEXT_AT + _TEXT_BYTES].split(b"\0", 1)[0].decode(errors="replace")
        return what, call, text, max(0.0, (time.monotonic_ns() - since_ns) / 1e9)

    # --- the monitor says what it has heard ----------------------------------------------------------------------

    def tell(self, encoded: bytes) -> None:
        """Replace the news that the rank reads.

        Args:
            encoded: JSON, of `ROOM_BYTES` at most.
        """
        if len(encoded) > ROOM_BYTES:
            raise ValueError("these news do not fit")
        version, _ = _NEWS.unpack_from(self._memory, _NEWS_AT)
        start = _NEWS_AT + _NEWS.size
        _NEWS.pack_into(self._memory, _NEWS_AT, version + 1, 0)
        self._memory[start : start + len(encoded)] = encoded
        _NEWS.pack_into(self._memory, _NEWS_AT, version + 2, len(encoded))

    @property
    def version(self) -> int:
        """A number that changes with the news."""
        return int(_NEWS.unpack_from(self._memory, _NEWS_AT)[0])

    def news(self) -> dict[str, Any] | None:
        """What the monitor has heard; None if nothing."""
        start = _NEWS_AT + _NEWS.size
        for _ in range(100):
            version, length = _NEWS.unpack_from(self._memory, _NEWS_AT)
            encoded = self._memory[start : start + length]
            if version % 2 == 0 and version == self.version:
                return json.loads(encoded) if length else None
            time.sleep(0.001)
        return None  # the monitor was stopped while it wrote


def activity_text(what: int, call: int, text: str) -> str:
    """What a rank does, in words.

    Example:
        >>> activity_text(CALLING, 12, "train"), activity_text(IDLE, 12, "train")
        ("in call 12 of step 'train'", "in its own code, after call 12 of step 'train'")
    """
    if what == NEW or (what == IDLE and not call):
        return "in its own code, before the first call of a step"
    if what == PREPARING:
        return f"preparing call {call} of step {text!r}"
    return f"{'in its own code, after' if what == IDLE else 'in'} call {call} of step {text!r}"
