"""Control connection: JSON messages, authentication and the event loop thread.

A message is one JSON object on a line of its own. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

PROTOCOL = "keras_strategy coordination 2"

# Longest line, in bytes, that a worker may send.
MAX_LINE = 1 << 20
_POLL_SECONDS = 0.1


class ProtocolError(Exception):
    """Received bytes that are not a message."""


def make_proof(secret: str, *about: Any) -> str:
    """Return the HMAC that proves knowledge of `secret`; it covers all of `about`."""
    text = json.dumps(about).encode()
    return hmac.new(secret.encode(), text, "sha256").hexdigest()


def is_proof(value: Any, secret: str, *about: Any) -> bool:
    return isinstance(value, str) and hmac.compare_digest(
        value.encode(errors="replace"), make_proof(secret, *about).encode()
    )


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a line; raise TypeError if it has a value not of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or None when the other end closes the connection.

    Raise ProtocolError for anything else, and OSError if the connection is lost.
    """
    try:
        line = await reader.readline()
    except ValueError as error:
        raise ProtocolError(f"a line that is too long: {error}") from None
    if not line.endswith(b"\n"):
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError(f"{len(line)} bytes that are not a message")
    return message


async def handle_messages(
    reader: asyncio.StreamReader, handle: Callable[[dict[str, Any]], object]
) -> str:
    """Handle every message that arrives, and return why no more will arrive."""
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
        cause = f"its process crashed, or its machine is down: {error}"
        return f"disconnected without notice ({cause})"
    return "disconnected without notice (its process was killed or crashed)"


def detach(*owners: socket.socket | asyncio.StreamWriter) -> None:
    """Close a forked child's copies of sockets that belong to its parent."""
    null = os.open(os.devnull, os.O_RDWR)
    for owner in owners:
        is_stream = isinstance(owner, asyncio.StreamWriter)
        number = (owner.get_extra_info("socket") if is_stream else owner).fileno()
        # Replace rather than close the descriptor: the object that owns it closes it
        # later, when the number may belong to another file.
        if number >= 0:
            os.dup2(null, number, inheritable=False)
    os.close(null)


def configure_socket(writer: asyncio.StreamWriter) -> None:
    """Send small messages at once, and detect within 20 s that a machine is down."""
    # The kernels of both machines exchange the probes. Pings of our own would stay
    # unanswered in a healthy process, too: while one long C call holds the GIL, or
    # after Ctrl-Z.
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        # Keep-alive pauses while sent bytes are unacknowledged. Milliseconds.
        ("TCP_USER_TIMEOUT", 20_000),
    ):
        # Only Linux has all of them.
        with contextlib.suppress(AttributeError, OSError):
            number = getattr(socket, option)
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


T = TypeVar("T")


class LoopThread:
    """Daemon thread that runs an event loop until it is stopped."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call in the thread; do nothing if the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        is_cancelled: Callable[[], bool] | None = None,
    ) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        while is_cancelled is not None and not future.done():
            concurrent.futures.wait([future], _POLL_SECONDS)
            if is_cancelled():
                future.cancel()
        return future.result()

    def stop(self, seconds: float) -> None:
        self.call_soon(self._stopped.set)
        self.join(seconds)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        async def run_until_stopped() -> None:
            await self._stopped.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        # asyncio.Runner may start a thread for its shutdown, which Python refuses
        # while the interpreter exits.
        self.loop.run_until_complete(run_until_stopped())
        self.loop.close()
