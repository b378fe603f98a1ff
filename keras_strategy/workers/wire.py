"""The messages between the workers, and the connections that they travel on.

A message is a JSON object on a line of its own. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

PROTOCOL = "keras_strategy coordination 2"

# The longest line that a worker may send.
MAX_LINE = 1 << 20


class ProtocolError(Exception):
    """What came is not a message."""


def nonce() -> str:
    """What nobody can have proved anything about before."""
    return secrets.token_hex(16)


def proof(secret: str, *about: Any) -> str:
    """What only those can say who know a secret.

    Args:
        secret: The secret.
        about: What is proved: who says it, nonces of both ends, claims.
    """
    text = json.dumps(about).encode()
    return hmac.new(secret.encode(), text, "sha256").hexdigest()


def proves(said: Any, secret: str, *about: Any) -> bool:
    """Whether something that came is what `proof` gives."""
    expected = proof(secret, *about)
    return isinstance(said, str) and hmac.compare_digest(
        said.encode(errors="replace"), expected.encode()
    )


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
        raise ProtocolError(f"{len(line)} bytes that are no message")
    return message


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, or None where the other end has closed the connection.

    Raises:
        ProtocolError: If what comes is none.
        OSError: If the connection is lost.
    """
    try:
        line = await reader.readline()
    except ValueError as error:
        raise ProtocolError(f"a line that is too long: {error}") from None
    return decode(line) if line.endswith(b"\n") else None


async def listen(
    reader: asyncio.StreamReader, handle: Callable[[dict[str, Any]], object]
) -> str:
    """Has every message handled that arrives, and returns why none will any more."""
    try:
        while (message := await receive(reader)) is not None:
            try:
                handle(message)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                kind = message["type"][:40]
                raise ProtocolError(f"of the type {kind!r}: {error!r}"[:200]) from error
    except ProtocolError as error:
        return f"sent a message that cannot be understood ({error})"
    except OSError as error:
        gone = f"its process crashed, or its machine is gone: {error}"
        return f"is gone without a word ({gone})"
    return "is gone without a word (its process was killed or crashed)"


def forget(*owners: socket.socket | asyncio.StreamWriter) -> None:
    """Closes a forked child's copies of sockets that belong to its parent."""
    null = os.open(os.devnull, os.O_RDWR)
    for owner in owners:
        stream = isinstance(owner, asyncio.StreamWriter)
        number = (owner.get_extra_info("socket") if stream else owner).fileno()
        # Rather than close it: the objects that own it will, when it may be
        # another file's.
        if number >= 0:
            os.dup2(null, number, inheritable=False)
    os.close(null)


def tune(writer: asyncio.StreamWriter) -> None:
    """Sends small messages at once, and notices within 20 s that a machine is gone.

    It is the kernel that probes, and the other's kernel that answers. Pings of our
    own would go unanswered also in a process that is well: while one long call into
    C holds the interpreter's lock, or after Ctrl-Z.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        # Keep-alive rests while sent bytes are unconfirmed. Milliseconds.
        ("TCP_USER_TIMEOUT", 20_000),
    ):
        # Linux has all of them.
        with contextlib.suppress(AttributeError, OSError):
            number = getattr(socket, option)
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
