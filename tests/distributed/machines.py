"""Simulated machines: network namespaces that a bridge connects.

Each has a host name, a /etc/hosts and network interfaces of its own. Linux and root are
needed. A process enters a machine before it starts its first thread.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


class Machine(NamedTuple):
    """A simulated machine, whose interface `eth0` is on the bridge."""

    namespace: str
    hostname: str
    address: str
    # The lines of /etc/hosts.
    hosts: tuple[str, ...]

    def enter(self) -> None:
        """Move this process to the machine."""
        libc = ctypes.CDLL(None, use_errno=True)

        def call(function: str, *arguments: object) -> None:
            if getattr(libc, function)(*arguments):
                number = ctypes.get_errno()
                raise OSError(number, f"{function}: {os.strerror(number)}")

        with open(f"/run/netns/{self.namespace}") as namespace:
            call("setns", namespace.fileno(), _CLONE_NEWNET)
        call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(["127.0.0.1 localhost", *self.hosts, ""]))
            file.flush()
            call("mount", file.name.encode(), b"/etc/hosts", None, _MS_BIND, None)
        call("sethostname", self.hostname.encode(), len(self.hostname))


def skip_without_namespaces() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("simulated machines need Linux and root")
    trial = f"ks{os.getpid()}-trial"
    try:
        _ip("netns", "add", trial)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system makes no network namespaces: {error}")
    _ip("netns", "delete", trial)


@contextlib.contextmanager
def simulated_machines(
    count: int,
    *,
    ipv6: bool = False,
    own_name: str | None = "address",
    wrong_interface: bool = False,
    blocked: Sequence[tuple[int, int]] = (),
) -> Iterator[list[Machine]]:
    """Make machines, named node1, node2 and so on, that last as long as the context.

    Args:
        count: The number of machines.
        ipv6: Whether their addresses are IPv6, instead of IPv4.
        own_name: What a machine's own name stands for: its "address", another address,
            or nothing if it is None. The other machines' names stand for theirs.
        wrong_interface: Whether a machine has another interface, which reaches no other
            machine, and which its own name stands for.
        blocked: Pairs of machines, from 0; the first cannot send to the second.
    """
    numbers = range(1, count + 1)
    prefix = f"ks{os.getpid()}-"
    addresses = [f"fd77::{n}" if ipv6 else f"10.77.0.{n}" for n in numbers]
    family, bits = ("-6", 64) if ipv6 else ("-4", 24)
    with contextlib.ExitStack() as made:

        def add_namespace(name: str) -> str:
            _ip("netns", "add", prefix + name)
            made.callback(_ip, "netns", "delete", prefix + name)
            _ip("-n", prefix + name, "link", "set", "lo", "up")
            return prefix + name

        switch = add_namespace("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        machines = []
        for n, address in zip(numbers, addresses, strict=True):
            here = add_namespace(f"node{n}")
            port = f"port{n}"
            pair = ["type", "veth", "peer", "name", "eth0", "netns", here]
            _ip("link", "add", port, "netns", switch, *pair)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", here, "link", "set", "eth0", "up")
            options = ["dev", "eth0", *(["nodad"] if ipv6 else [])]
            _ip("-n", here, family, "address", "add", f"{address}/{bits}", *options)
            own = address if own_name == "address" else own_name
            if wrong_interface:
                own = f"10.88.{n}.1"
                unused = ["type", "veth", "peer", "name", "eth2"]
                _ip("-n", here, "link", "add", "eth1", *unused)
                _ip("-n", here, "link", "set", "eth1", "up")
                _ip("-n", here, "address", "add", f"{own}/24", "dev", "eth1")
            hosts = [
                f"{own if m == n else other} node{m}"
                for m, other in zip(numbers, addresses, strict=True)
                if m != n or own is not None
            ]
            machines.append(Machine(here, f"node{n}", address, tuple(hosts)))
        for first, second in blocked:
            route = ["route", "add", "blackhole", addresses[second]]
            _ip("-n", machines[first].namespace, family, *route)
        yield machines


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
