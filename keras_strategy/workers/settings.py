"""What the environment and the cluster say about how the workers meet."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
from collections.abc import Sequence

PORT_VARIABLE = "KERAS_STRATEGY_PORT"
TIMEOUT_VARIABLE = "KERAS_STRATEGY_TIMEOUT_SECONDS"
SAVE_TIMEOUT_VARIABLE = "KERAS_STRATEGY_SAVE_TIMEOUT_SECONDS"
SECRET_VARIABLE = "KERAS_STRATEGY_SECRET"


def hub_address(addresses: Sequence[str]) -> tuple[str, int]:
    """Where the workers of a cluster meet: on the chief's host.

    The port is that of the environment variable KERAS_STRATEGY_PORT, or else the
    first one after the chief's own that no worker on the chief's host has.

    Args:
        addresses: The workers' addresses, `"host:port"`, the chief's first.
            Those of the others may be empty, where the cluster does not tell.

    Returns:
        The host and the port, the same ones on every worker.

    Raises:
        ValueError: If the chief's address has no host, or no port can be found.
    """
    if not addresses:
        raise ValueError("Expected the address of at least one worker. Received: []")
    host, port = _split(addresses[0])
    if not host:
        raise ValueError(
            "Expected the address of the chief, where the workers meet, to be "
            f"'host:port'. Received: {addresses[0]!r}"
        )
    given = os.environ.get(PORT_VARIABLE)
    if given:
        return host, _port(given, f"the environment variable {PORT_VARIABLE}")
    if not port:
        raise ValueError(
            f"The chief's address {addresses[0]!r} has no port. Set the environment "
            f"variable {PORT_VARIABLE} to a free port, the same on every worker."
        )
    chief = _port(port, f"the port of the chief's address {addresses[0]!r}")
    # Workers on one host often have consecutive ports.
    taken = {port for other, port in map(_split, addresses) if _same(other, host)}
    for candidate in range(chief + 1, 65536):
        if str(candidate) not in taken:
            return host, candidate
    raise ValueError(
        f"There is no port after the chief's ({addresses[0]!r}). Set the environment "
        f"variable {PORT_VARIABLE} to a free port, the same on every worker."
    )


def default_timeout_seconds() -> float:
    """How long to wait for other workers where the program does not say.

    Returns:
        The environment variable KERAS_STRATEGY_TIMEOUT_SECONDS, or else 600.

    Raises:
        ValueError: If the variable is not a positive number.
    """
    given = os.environ.get(TIMEOUT_VARIABLE)
    if not given:
        return 600.0
    return positive_seconds(given, f"the environment variable {TIMEOUT_VARIABLE}")


def save_timeout_seconds(other: float) -> float:
    """How long the others wait for a worker that writes files.

    Args:
        other: How long they wait for anything else.

    Returns:
        The environment variable KERAS_STRATEGY_SAVE_TIMEOUT_SECONDS, or else 3600, and
        no less than `other`.

    Raises:
        ValueError: If the variable is not a positive number.
    """
    given = os.environ.get(SAVE_TIMEOUT_VARIABLE)
    if not given:
        return max(3600.0, other)
    return positive_seconds(given, f"the environment variable {SAVE_TIMEOUT_VARIABLE}")


def positive_seconds(value: float | str, name: str) -> float:
    """A number of seconds that one can wait; `name` says whose it is."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise ValueError(
            f"Expected {name} to be a positive number of seconds. Received: {value!r}"
        )
    return seconds


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def all_here(addresses: Sequence[str]) -> bool:
    """Whether all workers are known to be on this machine, by their addresses."""
    hosts = {_split(address)[0] for address in addresses}
    if all(map(is_loopback, hosts)):
        return True
    # A name of this machine that all have; behind another's, ports may lead anywhere.
    return len(hosts) == 1 and all(hosts) and bool(own_addresses(*hosts))


def own_addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What a name stands for of this machine's own addresses, with their kinds."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    own = []
    for family, _, _, _, address in dict.fromkeys(found):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address[0], 0))
            own.append((family, str(address[0])))
    return own


def host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(address: str) -> tuple[str, str]:
    """The host, without brackets, and the text of the port, which may be empty."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        return host, port.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def _same(host: str, other: str) -> bool:
    return host == other or (is_loopback(host) and is_loopback(other))


def _port(text: str, name: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536:
        return int(text)
    raise ValueError(
        f"Expected {name} to be a port from 1 to 65535. Received: {text!r}"
    )
