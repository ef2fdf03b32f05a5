"""Connections between monitors: messages as JSON, each behind its length."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct(">I")
LONGEST = 2**22
"""Bytes of a message between monitors that know each other, at most."""

_CHUNK = 2**16


class MonitorLink:
    """A connection that never blocks.

    Args:
        connection: a socket, perhaps still connecting.
        longest: bytes of a message that is taken, at most.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        connection.setblocking(False)
        self.socket, self.longest = connection, longest
        self._out = b""
        self._in = b""

    @property
    def wants_to_send(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        encoded = json.dumps(message).encode()
        self._out += _LENGTH.pack(len(encoded)) + encoded

    def flush(self) -> None:
        """Send as many queued bytes as possible now.

        Raises:
            OSError: the connection has ended.
        """
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            self._out = self._out[sent:]

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived.

        Raises:
            OSError: the connection has ended.
            ValueError: what came is no message.
        """
        with contextlib.suppress(BlockingIOError):
            found = self.socket.recv(_CHUNK)
            if not found:
                raise ConnectionResetError
            self._in += found
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > self.longest:
                raise ValueError("too long")
            if len(self._in) < _LENGTH.size + length:
                return
            message = json.loads(self._in[_LENGTH.size : _LENGTH.size + length])
            self._in = self._in[_LENGTH.size + length :]
            if not isinstance(message, dict):
                raise ValueError("no message")
            yield message

    def finish(self) -> None:
        """End this side of the connection: the other one sees the end behind what was sent.

        Raises:
            OSError: the connection has ended.
        """
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def listen(everywhere: bool) -> socket.socket:
    """A socket that takes connections, at a free port.

    Args:
        everywhere: from other machines as well.
    """
    if everywhere and socket.has_dualstack_ipv6():
        try:
            return _set_up(socket.create_server(("::", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True))
        except OSError:  # IPv6 is switched off
            pass
    return _set_up(socket.create_server(("0.0.0.0" if everywhere else "127.0.0.1", 0), backlog=64))


def _set_up(listening: socket.socket) -> socket.socket:
    listening.setblocking(False)
    return listening


def start_connecting(address: str, port: int) -> socket.socket:
    """A socket that is connecting; it is writable when the connection is made.

    Raises:
        OSError: there is no way to the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect((address, port))
    except BlockingIOError:
        pass
    except OSError:
        made.close()
        raise
    return made
