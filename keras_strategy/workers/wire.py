"""The lines that travel between the workers, and the connections they travel on.

A message is a JSON object on a line of its own. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

PROTOCOL = "keras_strategy coordination 1"

# The longest line that a worker may send.
MAX_LINE = 1 << 20


class ProtocolError(Exception):
    """What came is not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """The line of a message.

    Raises:
        TypeError: If a value in it is not one of JSON's.
    """
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line.

    Raises:
        ProtocolError: If there is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError(f"not a message: {line[:80]!r}")
    return message


class Lines:
    """Cuts the bytes that arrive into lines.

    Args:
        limit: The longest line.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete with these bytes.

        Raises:
            ProtocolError: If a line grows too long.
        """
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._limit or any(len(x) > self._limit for x in lines):
            raise ProtocolError(f"a line of more than {self._limit} bytes")
        return lines


def tune(connection: socket.socket) -> None:
    """Sends small messages at once, and notices within 20 s that a machine is gone.

    It is the kernel that probes, and the other's kernel that answers. Pings of our
    own would go unanswered also in a process that is well: while one long call into
    C holds the interpreter's lock, or after Ctrl-Z.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        # Keep-alive rests while sent bytes are unconfirmed. Milliseconds.
        ("TCP_USER_TIMEOUT", 20_000),
    ):
        if hasattr(socket, option):  # Linux has all of them.
            with contextlib.suppress(OSError):
                connection.setsockopt(
                    socket.IPPROTO_TCP, getattr(socket, option), value
                )
