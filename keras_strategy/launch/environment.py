"""What a local cluster's workers find in their environment."""

import dataclasses
import json
import os
import secrets

from keras_strategy.launch.ports import free_ports

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
    from keras_strategy.launch.environment import LocalCluster

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
