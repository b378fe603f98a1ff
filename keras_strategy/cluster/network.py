"""Network of this machine: its addresses and interfaces, and ports to listen on."""

import array
import concurrent.futures
import contextlib
import ipaddress
import pathlib
import socket
import struct
import sys
from collections.abc import Sequence

from keras_strategy.cluster_resolver.cluster_spec import split_host_port

INTERFACE_VARIABLE = "KERAS_STRATEGY_INTERFACE"
LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 5.0
# Ports that the system assigns to connections and to servers that request no port.
_EPHEMERAL_PORTS = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_SIOCGIFCONF, _MAX_ADDRESSES = 0x8912, 256
_IPV6_ADDRESSES = pathlib.Path("/proc/net/if_inet6")


def is_loopback(host: str) -> bool:
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def all_local(addresses: Sequence[str]) -> bool:
    """Return True if the addresses show that all workers are on this machine."""
    hosts = {split_host_port(address)[0] for address in addresses}
    if all(map(is_loopback, hosts)):
        return True
    # One name of this machine for all. Another machine's may forward its ports.
    return len(hosts) == 1 and all(hosts) and bool(local_addresses(*hosts))


def local_addresses(host: str) -> list[str]:
    """Return those addresses of `host` that are this machine's."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = []
    for family, _, _, _, address in dict.fromkeys(found):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address[0], 0))
            addresses.append(str(address[0]))
    return addresses


def find_interfaces() -> dict[str, str]:
    """Return the name of the interface of each address of this machine, on Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.ip_address(bytes.fromhex(digits)))] = name
    # struct ifconf, and an array of struct ifreq: a name and a sockaddr.
    size = struct.calcsize("16s24s")
    replies = array.array("B", bytes(size * _MAX_ADDRESSES))
    request = struct.pack("iL", len(replies), replies.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for name, address in struct.iter_unpack("16s4x4s16x", replies[:length].tobytes()):
        found[socket.inet_ntoa(address)] = name.rstrip(b"\0").decode()
    return found


def address_of_interface(interface: str) -> str:
    found = find_interfaces()
    addresses = [address for address, name in found.items() if name == interface]
    if not addresses:
        raise ValueError(
            f"Expected `interface`, or the environment variable {INTERFACE_VARIABLE}, "
            "to be a network interface of this machine with an address: one of "
            f"{sorted(set(found.values()))}. Received: {interface!r}"
        )
    # IPv4 first. A link-local address needs the interface's number as well.
    return min(addresses, key=lambda a: (":" in a, a.startswith("fe80:")))


def listen_on_all_interfaces(
    port: int = 0, backlog: int | None = None
) -> socket.socket:
    """Listen on a port, by default a free one, with IPv4 and, if available, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


def find_unreachable(addresses: dict[int, str]) -> list[tuple[int, str]]:
    """Return the keys of the addresses that no connection reaches, and why."""

    def connect(item: tuple[int, str]) -> tuple[int, str] | None:
        host, port = split_host_port(item[1])
        try:
            socket.create_connection((host, int(port or 0)), _CONNECT_SECONDS).close()
        except OSError as error:
            return item[0], error.strerror or str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        return list(filter(None, pool.map(connect, addresses.items())))


def ephemeral_ports() -> range:
    try:
        first, last = map(int, _EPHEMERAL_PORTS.read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    return range(first, last + 1)


def describe_ports(addresses: Sequence[str]) -> str:
    ports = {int(split_host_port(address)[1] or 0) for address in addresses}
    chosen = ephemeral_ports()
    if ports <= set(chosen):
        return f"ports that the system chooses ({chosen[0]} to {chosen[-1]})"
    return "the ports " + ", ".join(map(str, sorted(ports)))
