"""Simulated machines: network namespaces that a bridge or a switch connects.

Each has a host name, a /etc/hosts and network interfaces of its own. Linux and root are
needed. A process enters a machine before it starts its first thread.
"""

import concurrent.futures
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from keras_strategy.cluster_resolver.cluster_spec import join_host_port
from tests.distributed import links as links_module
from tests.distributed.links import Links, enter_network

_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
# How long a packet waits at most for earlier ones, on a link with a rate alone.
_QUEUE_MS = 100
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


class Machine(NamedTuple):
    """A simulated machine, whose interface `eth0` leads to the others."""

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

        enter_network(self.namespace)
        call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(["127.0.0.1 localhost", *self.hosts, ""]))
            file.flush()
            call("mount", file.name.encode(), b"/etc/hosts", None, _MS_BIND, None)
        call("sethostname", self.hostname.encode(), len(self.hostname))

    def open_socket(self, kind: socket.SocketKind) -> socket.socket:
        """Return a socket of this machine, bound to a free port of its address."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET

        def open_socket() -> socket.socket:
            enter_network(self.namespace)
            opened = socket.socket(family, kind)
            opened.bind((self.address, 0))
            return opened

        # A socket stays in the network in which its thread has opened it.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(open_socket).result()


def join_as_worker(hosts: Sequence[str], machines: Sequence[Machine]) -> int:
    """Give the workers the hosts, enter this worker's machine, and return its rank."""
    configuration = json.loads(os.environ["TF_CONFIG"])
    rank, addresses = configuration["task"]["index"], configuration["cluster"]["worker"]
    configuration["cluster"]["worker"] = [
        join_host_port(host, int(address.rpartition(":")[2]))
        for host, address in zip(hosts, addresses, strict=True)
    ]
    os.environ["TF_CONFIG"] = json.dumps(configuration)
    if machines:
        machines[rank].enter()
    return rank


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
    delay_ms: float = 0.0,
    loss: float = 0.0,
    rate_mbit: float = 0.0,
    seed: int = 1,
    links: Links | None = None,
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
        delay_ms: Milliseconds from one machine to another.
        loss: The fraction of the frames that are lost, in each direction.
        rate_mbit: Megabits per second that a machine can send. Unlimited if 0.
        seed: Seed of the draws of lost frames.
        links: The links between the machines, which the caller can change meanwhile.
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

        namespaces = [add_namespace(f"node{n}") for n in numbers]
        state = {"delay_ms": delay_ms, "loss": loss, "rate_mbit": rate_mbit}
        qdisc = ["netem", "delay", f"{delay_ms}ms", "loss", f"{100 * loss}%"]
        if rate_mbit:
            qdisc += ["rate", f"{rate_mbit}mbit"]
        if rate_mbit and not (delay_ms or loss):
            # More kernels have it. A burst lasts a millisecond.
            burst = max(10, round(rate_mbit / 8))
            qdisc = ["tbf", "rate", f"{rate_mbit}mbit", "burst", f"{burst}kb"]
            qdisc += ["latency", f"{_QUEUE_MS}ms"]
        if links is None and any(state.values()) and not _has(qdisc, namespaces[0]):
            links = Links(made.enter_context(tempfile.NamedTemporaryFile()).name, count)
        if links is None:
            _connect_by_bridge(add_namespace("switch"), namespaces)
        else:
            if any(state.values()):
                links.set_all(**state)
            made.enter_context(_switch(links, seed, namespaces))
        machines = []
        for n, here, address in zip(numbers, namespaces, addresses, strict=True):
            if links is None and any(state.values()):
                _add_qdisc(here, "eth0", qdisc)
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


def _connect_by_bridge(switch: str, namespaces: Sequence[str]) -> None:
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for n, namespace in enumerate(namespaces):
        pair = ["type", "veth", "peer", "name", "eth0", "netns", namespace]
        _ip("link", "add", f"port{n}", "netns", switch, *pair)
        _ip("-n", switch, "link", "set", f"port{n}", "master", "bridge", "up")


@contextlib.contextmanager
def _switch(links: Links, seed: int, namespaces: Sequence[str]) -> Iterator[None]:
    """Run the switch in user space as long as the context lasts."""
    if not os.access(links_module.TUN, os.R_OK | os.W_OK):
        pytest.skip(f"a switch in user space needs {links_module.TUN}")
    script = [sys.executable, "-I", links_module.__file__]
    command = [*script, links.path, str(seed), *namespaces]
    # Leaving closes its stdin, which ends it.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield


def _has(qdisc: Sequence[str], namespace: str) -> bool:
    """Return True if the kernel can delay, lose or slow down packets itself."""
    try:
        _add_qdisc(namespace, "lo", qdisc)
    except (OSError, subprocess.CalledProcessError):
        return False
    subprocess.run(["tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root"])
    return True


def _add_qdisc(namespace: str, device: str, options: Sequence[str]) -> None:
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *options]
    subprocess.run(command, check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
