"""Rendezvous: the chief listens on a port, and every worker connects to it.

Both ends prove that they know the secret of the run without sending it. Nothing that an
untrusted client sends is shown to the user.
"""

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
    local_addresses,
)
from keras_strategy.workers.wire import (
    MAX_LINE,
    PROTOCOL,
    ProtocolError,
    configure_socket,
    encode,
    is_proof,
    make_proof,
    new_nonce,
    receive,
)

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _RefusedError(Exception):
    """The chief refuses this worker."""


def open_listeners(host: str, port: int, all_local: bool = False) -> list[socket.socket]:
    """Open the rendezvous port on no more addresses than necessary.

    A loopback host means that all workers are on this machine, so no other machine can
    connect. A name of this machine is opened at the addresses that it resolves to. All
    addresses are opened only if the name is not this machine's, as behind a router, or
    resolves to the loopback on this machine alone, as on Debian.

    Args:
        host: The host, as the other workers know it.
        port: The port.
        all_local: Whether all workers are on this machine.

    Raises:
        OSError: If the port cannot be opened, for instance because it is in use.
    """
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            is_name = host.lower().startswith("localhost")
            address = "127.0.0.1" if is_name else host
            return [socket.create_server((address, port), family=family)]
        local = local_addresses(host)
        if local and (all_local or not all(is_loopback(name) for _, name in local)):
            with contextlib.ExitStack() as opened:
                listeners = [
                    opened.enter_context(
                        socket.create_server((address, port), family=family)
                    )
                    for family, address in local
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
            f"Address already in use: {host_port(host, port)}, where the workers "
            "connect. End the process that listens there (perhaps one of an earlier "
            f"run), or set the environment variable {PORT_VARIABLE} to a free port, "
            "the same on every worker.",
        ) from None


def claim_rank(
    address: tuple[str, int], claim: dict[str, Any], secret: str
) -> socket.socket | None:
    """Ensure that no other process of this machine is the same worker.

    The chief listens only until all workers have arrived, so a later duplicate would
    wait until its timeout. The claim is a name in the kernel's abstract namespace: it
    has no file, nobody can connect to it, and the end of the process frees it.

    Args:
        address: The rendezvous address.
        claim: This worker's `rank`, and the `names` of all.
        secret: The secret of the run.

    Returns:
        A socket that holds the claim until it is closed; None where the system has no
        abstract namespace.

    Raises:
        ClusterError: If another process holds the claim.
    """
    run = json.dumps([*address, claim, secret], sort_keys=True).encode()
    name = f"\0keras_strategy {hashlib.blake2b(run, digest_size=16).hexdigest()}"
    holder = None
    try:
        holder = socket.socket(socket.AF_UNIX)
        holder.bind(name)
        return holder
    except (AttributeError, OSError) as error:
        if holder is not None:
            holder.close()
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            return None
        worker = claim["names"][claim["rank"]]
        raise ClusterError(
            f"{worker} cannot join at {host_port(*address)}: another process of this "
            f"machine has already joined as {worker}"
        ) from None


async def connect(
    address: tuple[str, int], claim: dict[str, Any], secret: str, timeout_seconds: float
) -> Streams:
    """Connect to the chief, and wait for it if it has not started yet.

    Args:
        address: The rendezvous address.
        claim: This worker's `rank`, and the `names` of all.
        secret: The secret of the run.
        timeout_seconds: How long to wait.

    Returns:
        The connection, after the chief's welcome.

    Raises:
        ClusterError: If the chief does not arrive or refuses this worker.
    """
    worker, chief = claim["names"][claim["rank"]], claim["names"][0]
    where = host_port(*address)
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return await _open_connection(address, claim, secret, left)
        except _RefusedError as refusal:
            raise ClusterError(f"{worker} cannot join at {where}: {refusal}") from None
        except ProtocolError:
            raise ClusterError(
                f"{worker} cannot join at {where}: the server there is not the {chief} "
                "of this run of keras_strategy"
            ) from None
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise ClusterError(
                    f"{chief} has not arrived within {timeout_seconds:g} s: {worker} "
                    f"cannot reach it at {where} ({str(error) or 'timed out'})"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _open_connection(
    address: tuple[str, int], claim: dict[str, Any], secret: str, seconds: float
) -> Streams:
    # The reply to an exchange has a value of each worker.
    max_line = MAX_LINE * (len(claim["names"]) + 1)
    async with asyncio.timeout(min(seconds, _CONNECT_SECONDS)):
        reader, writer = await asyncio.open_connection(*address, limit=max_line)
    try:
        # Without a listener, TCP can connect a port to itself.
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
            raise OSError("nothing listens there")
        configure_socket(writer)
        try:
            async with asyncio.timeout(min(seconds, _HANDSHAKE_SECONDS)):
                await _authenticate(reader, writer, claim, secret)
        except TimeoutError:
            raise OSError("the server there does not answer") from None
        return reader, writer
    except BaseException:
        writer.close()
        raise


async def _authenticate(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    claim: dict[str, Any],
    secret: str,
) -> None:
    nonce = new_nonce()
    writer.write(encode({"type": "hello", "protocol": PROTOCOL, "nonce": nonce}))
    challenge = await _receive_reply(reader)
    if challenge["type"] != "challenge":
        raise ProtocolError("no challenge")
    about = nonce, challenge.get("nonce"), claim
    proof = make_proof(secret, "worker", *about)
    writer.write(encode({"type": "join", "proof": proof, **claim}))
    answer = await _receive_reply(reader)
    if answer["type"] == "untrusted":
        raise _RefusedError("the chief there belongs to another run")
    if not is_proof(answer.get("proof"), secret, "chief", *about):
        raise ProtocolError("no proof")
    if answer["type"] == "refused":
        raise _RefusedError(answer.get("message"))
    if answer["type"] != "welcome":
        raise ProtocolError("no welcome")


async def _receive_reply(reader: asyncio.StreamReader) -> dict[str, Any]:
    reply = await receive(reader)
    if reply is None:
        raise OSError("it closed the connection")
    return reply
