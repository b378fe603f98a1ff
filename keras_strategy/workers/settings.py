"""Rendezvous settings from the environment and the cluster's addresses."""

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


def rendezvous_address(addresses: Sequence[str]) -> tuple[str, int]:
    """Return the host and port of the rendezvous: the same on every worker.

    The host is the chief's. The port is KERAS_STRATEGY_PORT, or else the first one
    after the chief's own that no worker on the chief's host uses.

    Args:
        addresses: The workers' addresses, `"host:port"`, the chief's first. The others
            may be empty, where the cluster does not know them.

    Raises:
        ValueError: If the chief's address has no host, or no port can be found.
    """
    if not addresses:
        raise ValueError("Expected the address of at least one worker. Received: []")
    host, port = _split(addresses[0])
    if not host:
        raise ValueError(
            "Expected the address of the chief, where the workers connect, to be "
            f"'host:port'. Received: {addresses[0]!r}"
        )
    configured = os.environ.get(PORT_VARIABLE)
    if configured:
        name = f"the environment variable {PORT_VARIABLE}"
        return host, _parse_port(configured, name)
    if not port:
        raise ValueError(
            f"The chief's address {addresses[0]!r} has no port. Set the environment "
            f"variable {PORT_VARIABLE} to a free port, the same on every worker."
        )
    chief = _parse_port(port, f"the port of the chief's address {addresses[0]!r}")
    # Workers on one host often have consecutive ports.
    used = {p for other, p in map(_split, addresses) if _is_same_host(other, host)}
    for candidate in range(chief + 1, 65536):
        if str(candidate) not in used:
            return host, candidate
    raise ValueError(
        f"There is no port after the chief's ({addresses[0]!r}). Set the environment "
        f"variable {PORT_VARIABLE} to a free port, the same on every worker."
    )


def default_timeout_seconds() -> float:
    """Return KERAS_STRATEGY_TIMEOUT_SECONDS, or else 600."""
    return _seconds_from_environment(TIMEOUT_VARIABLE, 600.0)


def save_timeout_seconds(minimum: float) -> float:
    """Return how long the other workers wait for one that writes files.

    That is KERAS_STRATEGY_SAVE_TIMEOUT_SECONDS, or else 3600 or a greater `minimum`.
    """
    return _seconds_from_environment(SAVE_TIMEOUT_VARIABLE, max(3600.0, minimum))


def _seconds_from_environment(name: str, default: float) -> float:
    value = os.environ.get(name)
    if not value:
        return default
    return positive_seconds(value, f"the environment variable {name}")


def positive_seconds(value: float | str, name: str) -> float:
    """Return a positive, finite number of seconds, or raise ValueError."""
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
    """Return True if an address reaches only this machine."""
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def all_local(addresses: Sequence[str]) -> bool:
    """Return True if the addresses show that all workers are on this machine."""
    hosts = {_split(address)[0] for address in addresses}
    if all(map(is_loopback, hosts)):
        return True
    # One name of this machine for all. Another machine's may forward its ports.
    return len(hosts) == 1 and all(hosts) and bool(local_addresses(*hosts))


def local_addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return those addresses of `host` that are this machine's, with their families."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = []
    for family, _, _, _, address in dict.fromkeys(found):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address[0], 0))
            addresses.append((family, str(address[0])))
    return addresses


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(address: str) -> tuple[str, str]:
    """Return the host without brackets, and the port as text, which may be empty."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        return host, port.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def _is_same_host(host: str, other: str) -> bool:
    return host == other or (is_loopback(host) and is_loopback(other))


def _parse_port(text: str, name: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536:
        return int(text)
    raise ValueError(
        f"Expected {name} to be a port from 1 to 65535. Received: {text!r}"
    )
