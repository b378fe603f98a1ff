"""The place where the workers meet: the chief opens it, and every worker goes there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import socket
import time
from typing import Any

from keras_strategy.errors import ClusterError
from keras_strategy.workers.settings import (
    PORT_VARIABLE,
    host_port,
    is_loopback,
    own_addresses,
)
from keras_strategy.workers.wire import (
    MAX_LINE,
    PROTOCOL,
    ProtocolError,
    encode,
    nonce,
    proof,
    proves,
    receive,
    tune,
)

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Refused(Exception):
    """The chief does not let this worker in."""


def listen(host: str, port: int, all_here: bool = False) -> list[socket.socket]:
    """Opens the port where the workers meet, at those addresses that it needs.

    A host that is the loopback tells that all workers are on this machine, since
    no other could reach it there; then no other machine can connect. A name of this
    machine is opened at what it stands for. Everything is opened only where that is
    not this machine's, as behind a router, or where the name is the loopback here
    alone, as Debian has it.

    Args:
        host: The host, as others know it.
        port: The port.
        all_here: Whether all workers are on this machine.

    Raises:
        OSError: If it cannot be opened, such as when it is taken.
    """
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            name = host.lower().startswith("localhost")
            at = "127.0.0.1" if name else host
            return [socket.create_server((at, port), family=family)]
        own = own_addresses(host)
        if own and (all_here or not all(is_loopback(address) for _, address in own)):
            with contextlib.ExitStack() as opened:
                listeners = [
                    opened.enter_context(
                        socket.create_server((address, port), family=family)
                    )
                    for family, address in own
                ]
                opened.pop_all()
            return listeners
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return [
                    socket.create_server(
                        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
                    )
                ]
        return [socket.create_server(("", port))]
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


def hold_place(
    address: tuple[str, int], claim: dict[str, Any], secret: str
) -> socket.socket | None:
    """Makes sure that no other process of this machine is the same worker.

    The chief listens until all have arrived; who comes after that could not tell it
    from one that is late. What is held is a name of the kernel's, which no file stands
    for, nobody can connect to, and the end of the process frees.

    Args:
        address: Where the workers meet.
        claim: Who this worker is: its `rank`, and the `names` of all.
        secret: What the workers of this run know.

    Returns:
        What holds it until it is closed; None where the system has no such names.

    Raises:
        ClusterError: If another process holds it.
    """
    run = json.dumps([*address, claim, secret], sort_keys=True).encode()
    name = f"\0keras_strategy {hashlib.blake2b(run, digest_size=16).hexdigest()}"
    held = None
    try:
        held = socket.socket(socket.AF_UNIX)
        held.bind(name)
        return held
    except (AttributeError, OSError) as error:
        if held is not None:
            held.close()
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            return None
        me = claim["names"][claim["rank"]]
        raise ClusterError(
            f"{me} cannot join at {host_port(*address)}: another process of this "
            f"machine has joined as {me} before"
        ) from None


async def connect(
    address: tuple[str, int], claim: dict[str, Any], secret: str, timeout_seconds: float
) -> Streams:
    """Connects to the chief, and waits for it where it is not there yet.

    Args:
        address: The host and the port where the workers meet.
        claim: Who this worker is: its `rank`, and the `names` of all.
        secret: What the workers of this run know.
        timeout_seconds: How long to wait.

    Returns:
        The connection, on which the chief's welcome has been read.

    Raises:
        ClusterError: If it does not arrive, or this worker does not belong there.
    """
    me, chief = claim["names"][claim["rank"]], claim["names"][0]
    where = host_port(*address)
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return await _introduce(address, claim, secret, left)
        except _Refused as refusal:
            raise ClusterError(f"{me} cannot join at {where}: {refusal}") from None
        except ProtocolError:
            raise ClusterError(
                f"{me} cannot join at {where}: what listens there is not the {chief} "
                "of this run of keras_strategy"
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
    address: tuple[str, int], claim: dict[str, Any], secret: str, seconds: float
) -> Streams:
    # An answer to `agree` has a value of each.
    longest = MAX_LINE * (len(claim["names"]) + 1)
    async with asyncio.timeout(min(seconds, _CONNECT_SECONDS)):
        reader, writer = await asyncio.open_connection(*address, limit=longest)
    try:
        # Without a listener, TCP can connect a port to itself.
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
            raise OSError("nothing listens there")
        tune(writer)
        try:
            async with asyncio.timeout(min(seconds, _ANSWER_SECONDS)):
                await _prove(reader, writer, claim, secret)
        except TimeoutError:
            raise OSError("what listens there does not answer") from None
        return reader, writer
    except BaseException:
        writer.close()
        raise


async def _prove(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    claim: dict[str, Any],
    secret: str,
) -> None:
    """Both ends prove that they know the secret, which nobody says.

    Nothing that comes from somebody who has not is shown to people.
    """
    mine = nonce()
    writer.write(encode({"type": "hello", "protocol": PROTOCOL, "nonce": mine}))
    challenge = await _answer(reader)
    if challenge["type"] != "challenge":
        raise ProtocolError("no challenge")
    about = mine, challenge.get("nonce"), claim
    said = {"type": "join", "proof": proof(secret, "worker", *about)}
    writer.write(encode(said | claim))
    answer = await _answer(reader)
    if answer["type"] == "stranger":
        raise _Refused("the chief there belongs to another run")
    if not proves(answer.get("proof"), secret, "chief", *about):
        raise ProtocolError("no proof")
    if answer["type"] == "refused":
        raise _Refused(answer.get("message"))
    if answer["type"] != "welcome":
        raise ProtocolError("no welcome")


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    answer = await receive(reader)
    if answer is None:
        raise OSError("it closed the connection")
    return answer
