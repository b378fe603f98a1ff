"""Free ports of this machine.

What a local cluster's workers find in their environment.
"""

import atexit
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import secrets
import socket
import sys

_LOWEST = 10_000
_EPHEMERAL = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
# As the C library, Python, torch's store and gRPC say it.
_TAKEN = re.compile(r"address already in use|EADDRINUSE|ADDRESS_IN_USE", re.IGNORECASE)
# Not the generator that a program seeds: two programs with one seed would meet.
_random = random.SystemRandom()
# Who looks for ports does not open them; the workers that it starts do, after they have
# imported an engine. Meanwhile other programs would find the same ones, so each that
# was found has a name of this machine's, which one process can have. Those of the last
# ports are kept, for as long as this process lives.
_NAME = "\0keras_strategy port {}"
_names: collections.deque[socket.socket] = collections.deque()
_NAMES = 200


def free_ports(count: int, among: range | None = None) -> list[int]:
    """Finds ports that nobody uses now.

    They lie below the range from which the system gives ports to connections, so only
    a server can take one before it is used. On Linux other programs that look for ports
    here do not find them either, while this process lives and has not found many more.

    Args:
        count: How many.
        among: Where to look instead.

    Returns:
        Different ports, in no order.

    Raises:
        OSError: If there are not as many.

    Example:

    ```python
    from keras_strategy.launch.local_cluster import free_ports

    assert len(set(free_ports(3))) == 3
    ```
    """
    candidates = among or range(_LOWEST, _first_ephemeral())
    ports: list[int] = []
    # All are held until the last is found, so that none comes twice.
    with contextlib.ExitStack() as held:
        for port in _random.sample(candidates, len(candidates)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                # Every interface: a server that listens on one of them is in the way.
                probe.bind(("", port))
                _take_name(port)
                ports.append(port)
    if len(ports) < count:
        raise OSError(
            f"Expected {count} free ports between {candidates.start} and "
            f"{candidates.stop - 1}. Found: {len(ports)}"
        )
    return ports


def reports_port_in_use(output: str) -> bool:
    """Tells whether a program's output complains about a port that is in use."""
    return _TAKEN.search(output) is not None


def _take_name(port: int) -> None:
    """Keeps others that look for ports from finding it; OSError if one has."""
    if sys.platform != "linux":
        return  # there are no names without files
    try:
        name = socket.socket(socket.AF_UNIX)
    except OSError:
        return  # where none may be made, all do without
    try:
        name.bind(_NAME.format(port))
    except OSError:
        name.close()
        raise
    _names.append(name)
    if len(_names) > _NAMES:
        _names.popleft().close()


@atexit.register
def _give_names_back() -> None:
    while _names:
        _names.pop().close()


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # A machine may give out nearly all of its ports; then any must do.
    return first if first > _LOWEST + 1_000 else 60_000


RENDEZVOUS_PORT = "KERAS_STRATEGY_PORT"
SECRET = "KERAS_STRATEGY_SECRET"
LOGICAL_CPUS = "KERAS_STRATEGY_LOGICAL_CPUS"


@dataclasses.dataclass(frozen=True)
class LocalCluster:
    """The addresses of workers on this machine, and of what they share.

    Attributes:
        ports: The port of each worker, by rank.
        hub_port: The port at which worker 0 coordinates all of them.
        chief: Whether the first worker is the task "chief".
        devices_per_worker: The logical CPU devices of each; None leaves them alone.
        secret: What the workers know each other by, and nobody else knows.

    Example:

    ```python
    from keras_strategy.launch.local_cluster import LocalCluster

    cluster = LocalCluster((12345, 12346), 12347)
    assert "127.0.0.1:12346" in cluster.variables(0)["TF_CONFIG"]
    assert cluster.name(1) == "worker 1"
    ```
    """

    ports: tuple[int, ...]
    hub_port: int
    chief: bool = False
    devices_per_worker: int | None = None
    secret: str = dataclasses.field(
        default_factory=lambda: secrets.token_hex(32), repr=False
    )

    @classmethod
    def on_free_ports(
        cls, workers: int, chief: bool = False, devices_per_worker: int | None = None
    ) -> "LocalCluster":
        """Makes the cluster of a number of workers, on ports that are free."""
        hub_port, *ports = free_ports(workers + 1)
        return cls(tuple(ports), hub_port, chief, devices_per_worker)

    def task(self, rank: int) -> tuple[str, int]:
        """The type and index of the task of a rank."""
        if self.chief:
            return ("chief", 0) if rank == 0 else ("worker", rank - 1)
        return "worker", rank

    def name(self, rank: int) -> str:
        """What messages call the worker of a rank."""
        task_type, index = self.task(rank)
        return f"{task_type} {index}"

    def variables(self, rank: int) -> dict[str, str]:
        """The environment variables of the worker of a rank."""
        cluster: dict[str, list[str]] = {}
        for other, port in enumerate(self.ports):
            cluster.setdefault(self.task(other)[0], []).append(f"127.0.0.1:{port}")
        task_type, index = self.task(rank)
        task = {"type": task_type, "index": index}
        variables = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            RENDEZVOUS_PORT: str(self.hub_port),
            SECRET: self.secret,
            **shared_variables(),
        }
        if self.devices_per_worker is not None:
            variables[LOGICAL_CPUS] = str(self.devices_per_worker)
        return variables


def thread_limits(workers: int) -> dict[str, str]:
    """The environment variables that share this machine's cores among workers.

    Torch's threads, and those of NumPy's libraries, wait for work by spinning. Where
    each worker has as many as the machine has cores they keep each other from working,
    to a hundredth of the speed.

    Args:
        workers: How many there are on this machine. One keeps what it would have.
    """
    if workers == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // workers))}


def available_cores() -> int:
    """The cores that this process and those that it starts may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shared_variables() -> dict[str, str]:
    """The environment variables that every worker has alike, in any cluster."""
    return {
        # XLA sizes the threads of its CPU devices by it. With fewer threads than
        # devices that wait for each other, the process aborts.
        "NPROC": os.environ.get("NPROC") or str(max(8, os.cpu_count() or 1)),
        # Lines arrive when they are printed, not when a buffer is full.
        "PYTHONUNBUFFERED": "1",
    }
