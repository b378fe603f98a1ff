"""The place where the workers meet: the chief opens it, and every worker goes there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from typing import Any

from keras_strategy.errors import ClusterError
from keras_strategy.workers.settings import PORT_VARIABLE, host_port, is_loopback
from keras_strategy.workers.wire import MAX_LINE, ProtocolError, encode, receive, tune

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Refused(Exception):
    """The chief does not let this worker in."""


def listen(host: str, port: int) -> socket.socket:
    """Opens the port where the workers meet.

    A host that is the loopback tells that all workers are on this machine, since
    no other could reach it there; then no other machine can connect.

    Raises:
        OSError: If it cannot be opened, such as when it is taken.
    """
    try:
        if is_loopback(host):
            if ":" in host:
                return socket.create_server((host, port), family=socket.AF_INET6)
            name = host.lower().startswith("localhost")
            return socket.create_server(("127.0.0.1" if name else host, port))
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True
                )
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"Address already in use: {host_port(host, port)}, where the workers are "
            "to meet. End the process that listens there (perhaps one of an earlier "
            f"run), or set the environment variable {PORT_VARIABLE} to a free port, "
            "the same on every worker.",
        ) from None


async def connect(
    address: tuple[str, int], hello: dict[str, Any], timeout_seconds: float
) -> Streams:
    """Connects to the chief, and waits for it where it is not there yet.

    Args:
        address: The host and the port where the workers meet.
        hello: Who this worker is.
        timeout_seconds: How long to wait.

    Returns:
        The connection, on which the chief's welcome has been read.

    Raises:
        ClusterError: If it does not arrive, or this worker does not belong there.
    """
    me, chief = hello["names"][hello["rank"]], hello["names"][0]
    where = host_port(*address)
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return await _introduce(address, hello, min(left, _CONNECT_SECONDS))
        except _Refused as refusal:
            raise ClusterError(f"{me} cannot join at {where}: {refusal}") from None
        except ProtocolError:
            raise ClusterError(
                f"{me} cannot join at {where}: what listens there is not the {chief} "
                "of a run of keras_strategy"
            ) from None
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise ClusterError(
                    f"{chief} has not arrived within {timeout_seconds:g} s: {me} "
                    f"cannot reach it at {where} ({str(error) or 'timed out'})"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _introduce(
    address: tuple[str, int], hello: dict[str, Any], seconds: float
) -> Streams:
    # An answer to `agree` has a value of each.
    longest = MAX_LINE * (len(hello["names"]) + 1)
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(*address, limit=longest)
    try:
        # Without a listener, TCP can connect a port to itself.
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
            raise OSError("nothing listens there")
        tune(writer)
        writer.write(encode(hello))
        async with asyncio.timeout(_ANSWER_SECONDS):
            answer = await receive(reader)
        if answer is None:
            raise OSError("it closed the connection")
        if answer["type"] == "refused":
            raise _Refused(answer.get("message"))
        if answer["type"] != "welcome":
            raise ProtocolError(answer["type"])
        return reader, writer
    except BaseException:
        writer.close()
        raise
