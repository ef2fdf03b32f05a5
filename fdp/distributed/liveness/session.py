"""Numbered messages between two monitors, so that a broken connection loses none.

Each message carries its number, and the last number that arrived from the other side. Messages that have not arrived
are kept, and sent again over the next connection.
"""

from __future__ import annotations

from collections import deque
from typing import Any

_KEPT = 4096
"""So many messages are kept. A monitor that is away for longer gets the whole state again."""


class Session:
    """One side of the messages between two monitors, over any number of connections.

    Attributes:
        received: the number of the last message that has come.
    """

    def __init__(self) -> None:
        self.received = 0
        self._said = 0
        self._unconfirmed: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def say(self, message: dict[str, Any]) -> dict[str, Any]:
        """Number a message for sending; it is kept until it has arrived."""
        self._said += 1
        numbered = {**message, "number": self._said, "received": self.received}
        self._unconfirmed.append(numbered)
        return numbered

    def resume(self, received: int) -> tuple[list[dict[str, Any]], bool]:
        """The messages to send again over a new connection.

        Args:
            received: up to which number the other side has heard.

        Returns:
            The messages, and whether these are all that it has not heard.
        """
        self._confirm(received)
        first = self._unconfirmed[0]["number"] if self._unconfirmed else self._said + 1
        return list(self._unconfirmed), first == received + 1

    def take(self, message: dict[str, Any]) -> bool:
        """Take a received message; returns whether it is new.

        Raises:
            ValueError: it is none of a session.
        """
        number, received = message.get("number"), message.get("received")
        if not isinstance(number, int) or not isinstance(received, int):
            raise ValueError("no message of a session")
        self._confirm(received)
        if number <= self.received:
            return False
        self.received = number
        return True

    def _confirm(self, received: int) -> None:
        while self._unconfirmed and self._unconfirmed[0]["number"] <= received:
            self._unconfirmed.popleft()
