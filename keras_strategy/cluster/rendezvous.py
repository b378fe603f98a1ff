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
import math
import os
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

from keras_strategy.cluster import transport
from keras_strategy.cluster.network import (
    is_loopback,
    listen_on_all_interfaces,
    local_addresses,
)
from keras_strategy.cluster.transport import ProtocolError
from keras_strategy.cluster_resolver.cluster_spec import (
    DEFAULT_PORT,
    join_host_port,
    port_number,
    split_host_port,
)
from keras_strategy.errors import ClusterError

PORT_VARIABLE = "KERAS_STRATEGY_PORT"
TIMEOUT_VARIABLE = "KERAS_STRATEGY_TIMEOUT_SECONDS"
SAVE_TIMEOUT_VARIABLE = "KERAS_STRATEGY_SAVE_TIMEOUT_SECONDS"
SECRET_VARIABLE = "KERAS_STRATEGY_SECRET"
# Below those that systems assign to connections.
_JOB_PORTS = range(20_000, 30_000)


def rendezvous_address(addresses: Sequence[str], job: str = "") -> tuple[str, int]:
    """Return the chief's host, and the configured port or a free one after its own."""
    # Where all jobs have the same default port, the port is derived from the job.
    host, port = split_host_port(addresses[0])
    if not host:
        raise ValueError(
            "Expected the address of the chief, where the workers connect, to be "
            f"'host:port'. Received: {addresses[0]!r}"
        )
    configured = os.environ.get(PORT_VARIABLE)
    if configured:
        name = f"the environment variable {PORT_VARIABLE}"
        return host, port_number(configured, name)
    if not port:
        raise ValueError(
            f"The chief's address {addresses[0]!r} has no port. Set the environment "
            f"variable {PORT_VARIABLE} to a free port, the same on every worker."
        )
    chief = port_number(port, f"the port of the chief's address {addresses[0]!r}")
    if job and chief == DEFAULT_PORT:
        return host, _JOB_PORTS[zlib.crc32(job.encode()) % len(_JOB_PORTS)]
    # Workers on one host often have consecutive ports.
    used = {
        p
        for other, p in map(split_host_port, addresses)
        if other == host or (is_loopback(other) and is_loopback(host))
    }
    for candidate in range(chief + 1, 65536):
        if str(candidate) not in used:
            return host, candidate
    raise ValueError(
        f"There is no port after the chief's ({addresses[0]!r}). Set the environment "
        f"variable {PORT_VARIABLE} to a free port, the same on every worker."
    )


def default_timeout_seconds() -> float:
    return _read_seconds(TIMEOUT_VARIABLE, 600.0)


def save_timeout_seconds(minimum: float) -> float:
    """Return how long the other workers wait for one that writes files."""
    return _read_seconds(SAVE_TIMEOUT_VARIABLE, max(3600.0, minimum))


def _read_seconds(name: str, default: float) -> float:
    value = os.environ.get(name) or default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"Expected the environment variable {name} to be a positive number of "
            f"seconds. Received: {value!r}"
        )
    return seconds


_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _RefusedError(Exception):
    """The chief refuses this worker."""


def open_listeners(
    host: str, port: int, all_local: bool = False
) -> list[socket.socket]:
    """Open the rendezvous port on no more addresses than necessary."""
    # All addresses are opened only if the name is not this machine's, as behind a
    # router, or resolves to the loopback on this machine alone, as on Debian.
    try:
        if is_loopback(host):
            is_name = host.lower().startswith("localhost")
            addresses = ["127.0.0.1" if is_name else host]
        else:
            addresses = local_addresses(host)
            if not all_local and all(map(is_loopback, addresses)):
                addresses = []
        with contextlib.ExitStack() as opened:
            listeners = []
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, port), family=family)
                listeners.append(opened.enter_context(listener))
            opened.pop_all()
        if listeners:
            return listeners
        return [listen_on_all_interfaces(port)]
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"Address already in use: {join_host_port(host, port)}, where the workers "
            "connect. End the process that listens there (perhaps one of an earlier "
            f"run), or set the environment variable {PORT_VARIABLE} to a free port, "
            "the same on every worker.",
        ) from None


def reserve_name(name: str) -> socket.socket | None:
    """Reserve a name on this machine until the returned socket, if any, is closed."""
    if sys.platform != "linux":
        return None
    holder = socket.socket(socket.AF_UNIX)
    try:
        # A name in the kernel's abstract namespace has no file, nobody can connect to
        # it, and the end of the process frees it.
        holder.bind(f"\0keras_strategy {name}")
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return None
    return holder


def claim_rank(
    address: tuple[str, int], claim: dict[str, Any], secret: str
) -> socket.socket | None:
    """Ensure that no other process of this machine is the same worker."""
    # The chief listens only until all workers have arrived, so a later duplicate would
    # wait until its timeout.
    run = json.dumps([*address, claim, secret], sort_keys=True).encode()
    try:
        return reserve_name(hashlib.blake2b(run, digest_size=16).hexdigest())
    except OSError:
        worker = claim["names"][claim["rank"]]
        raise ClusterError(
            f"{worker} cannot join at {join_host_port(*address)}: another process of "
            f"this machine has already joined as {worker}. If `multiprocessing` "
            "spawned this one, it runs the program again: put what only the first may "
            'run under `if __name__ == "__main__":`'
        ) from None


async def connect(
    address: tuple[str, int], claim: dict[str, Any], secret: str, timeout_seconds: float
) -> Streams:
    """Connect to the chief, and wait for it if it has not started yet."""
    worker, chief = claim["names"][claim["rank"]], claim["names"][0]
    where = join_host_port(*address)
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
    max_line = transport.MAX_LINE * (len(claim["names"]) + 1)
    async with asyncio.timeout(min(seconds, _CONNECT_SECONDS)):
        reader, writer = await asyncio.open_connection(*address, limit=max_line)
    try:
        # Without a listener, TCP can connect a port to itself.
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
            raise OSError("nothing listens there")
        transport.configure_socket(writer)
        async with asyncio.timeout(min(seconds, _HANDSHAKE_SECONDS)):
            await _authenticate(reader, writer, claim, secret)
        return reader, writer
    except BaseException as error:
        writer.close()
        if isinstance(error, TimeoutError):
            raise OSError("the server there does not answer") from None
        raise


async def _authenticate(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    claim: dict[str, Any],
    secret: str,
) -> None:
    async def receive_reply() -> dict[str, Any]:
        reply = await transport.receive(reader)
        if reply is None:
            raise OSError("it closed the connection")
        return reply

    nonce = secrets.token_hex(16)
    hello = {"type": "hello", "protocol": transport.PROTOCOL, "nonce": nonce}
    writer.write(transport.encode(hello))
    challenge = await receive_reply()
    if challenge["type"] != "challenge":
        raise ProtocolError("no challenge")
    about = nonce, challenge.get("nonce"), claim
    proof = transport.make_proof(secret, "worker", *about)
    writer.write(transport.encode({"type": "join", "proof": proof, **claim}))
    answer = await receive_reply()
    if answer["type"] == "untrusted":
        raise _RefusedError("the chief there belongs to another run")
    if not transport.is_proof(answer.get("proof"), secret, "chief", *about):
        raise ProtocolError("no proof")
    if answer["type"] != "welcome":
        raise _RefusedError(answer.get("message"))
