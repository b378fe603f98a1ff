"""How a worker reaches the chief."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from keras_strategy.errors import ClusterError
from keras_strategy.workers.settings import host_port
from keras_strategy.workers.wire import Lines, ProtocolError, decode, encode, tune

_ANSWER_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5


def connect(
    address: tuple[str, int],
    hello: dict[str, Any],
    lines: Lines,
    timeout_seconds: float,
) -> tuple[socket.socket, list[bytes]]:
    """Connects to the chief, and waits for it where it is not there yet.

    Args:
        address: The host and the port where the workers meet.
        hello: Who this worker is.
        lines: Keeps what arrives.
        timeout_seconds: How long to wait.

    Returns:
        The connection, and the lines that came with the chief's welcome.

    Raises:
        ClusterError: If it does not arrive, or this worker does not belong there.
    """
    me, chief = hello["names"][hello["rank"]], hello["names"][0]
    where = host_port(*address)
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            with contextlib.ExitStack() as on_error:
                connection = socket.create_connection(address, max(0.1, min(left, 5.0)))
                on_error.callback(connection.close)
                # Without a listener, TCP can connect a port to itself.
                if connection.getsockname() == connection.getpeername():
                    raise OSError("nothing listens there")
                answer, rest = _introduce(connection, hello, lines)
                if answer["type"] == "refused":
                    raise ClusterError(
                        f"{me} cannot join at {where}: {answer.get('message')}"
                    )
                if answer["type"] != "welcome":
                    raise ProtocolError(answer["type"])
                on_error.pop_all()
                return connection, rest
        except ProtocolError:
            raise ClusterError(
                f"{me} cannot join at {where}: what listens there is not the {chief} "
                "of a run of keras_strategy"
            ) from None
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise ClusterError(
                    f"{chief} has not arrived within {timeout_seconds:g} s: {me} "
                    f"cannot reach it at {where} ({error})"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _introduce(
    connection: socket.socket, hello: dict[str, Any], lines: Lines
) -> tuple[dict[str, Any], list[bytes]]:
    """Says hello; returns the answer, and the lines that came with it."""
    tune(connection)
    connection.settimeout(_ANSWER_SECONDS)
    connection.sendall(encode(hello))
    received: list[bytes] = []
    while not received:
        data = connection.recv(65536)
        if not data:
            raise OSError("it closed the connection")
        received = lines.feed(data)
    connection.settimeout(None)
    return decode(received[0]), received[1:]
