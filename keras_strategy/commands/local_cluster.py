"""Addresses and environment variables of a cluster of local workers."""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import secrets
import socket
import subprocess

from keras_strategy.cluster.network import ephemeral_ports
from keras_strategy.cluster.rendezvous import (
    PORT_VARIABLE,
    SECRET_VARIABLE,
    reserve_name,
)
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec

_LOWEST_PORT = 10_000
# As the C library, Python, torch's store and gRPC write it.
PORT_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|ADDRESS_IN_USE", re.IGNORECASE
)
# Not the generator that a program seeds: two programs with one seed would collide.
_random = random.SystemRandom()
# The process that looks for ports does not open them: the workers that it starts do,
# after they have imported a backend. Until then other programs would find the same
# ports. So each port found is reserved by a name, which only one process can bind. The
# latest reservations, by their sockets' descriptors, last as long as this process.
_MAX_RESERVATIONS = 200
_reservations: collections.deque[int] = collections.deque()


@dataclasses.dataclass(frozen=True)
class LocalCluster:
    """Addresses of workers on this machine, and their shared secret."""

    ports: tuple[int, ...]
    rendezvous_port: int
    chief: bool = False  # whether the first worker is the task "chief"
    devices_per_worker: int | None = None
    secret: str = dataclasses.field(
        default_factory=lambda: secrets.token_hex(32), repr=False
    )
    indices: tuple[int, ...] = ()  # of the workers, by rank, where they have gaps

    @classmethod
    def on_free_ports(
        cls,
        workers: int,
        chief: bool = False,
        devices_per_worker: int | None = None,
        indices: tuple[int, ...] = (),
    ) -> "LocalCluster":
        """Return a cluster of so many workers on free ports."""
        rendezvous_port, *ports = free_ports(workers + 1)
        return cls(
            tuple(ports), rendezvous_port, chief, devices_per_worker, indices=indices
        )

    def task(self, rank: int) -> tuple[str, int]:
        if self.chief:
            return ("chief", 0) if rank == 0 else ("worker", rank - 1)
        return "worker", self.indices[rank] if self.indices else rank

    def name(self, rank: int) -> str:
        task_type, index = self.task(rank)
        return f"{task_type} {index}"

    def variables(self, rank: int) -> dict[str, str]:
        jobs: dict[str, dict[int, str]] = {}
        for other, port in enumerate(self.ports):
            task_type, index = self.task(other)
            jobs.setdefault(task_type, {})[index] = f"127.0.0.1:{port}"
        task_type, index = self.task(rank)
        task = {"type": task_type, "index": index}
        cluster = ClusterSpec(jobs).as_dict()
        variables = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            PORT_VARIABLE: str(self.rendezvous_port),
            SECRET_VARIABLE: self.secret,
            **shared_variables(),
        }
        if self.devices_per_worker is not None:
            variables["KERAS_STRATEGY_LOGICAL_CPUS"] = str(self.devices_per_worker)
        return variables


def shared_variables() -> dict[str, str]:
    """Return the environment variables that all workers of any cluster share."""
    return {
        # XLA sizes the thread pool of its CPU devices by it. With fewer threads than
        # devices that wait for each other, the process aborts.
        "NPROC": os.environ.get("NPROC") or str(max(8, os.cpu_count() or 1)),
        # Lines arrive when they are printed, not when a buffer is full.
        "PYTHONUNBUFFERED": "1",
    }


def thread_limits(workers: int) -> dict[str, str]:
    """Return the environment variables that share the cores among workers."""
    # Threads that spin, one per core in each worker, slow them down a hundredfold.
    if workers == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // workers))}


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """Return this process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1"))
    # By UUID: nvidia-smi numbers the GPUs in another order than CUDA.
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        return tuple(subprocess.check_output(command, text=True, timeout=60).split())
    except (OSError, subprocess.SubprocessError):
        return ()


def count_workers(workers: int | str, gpus_per_worker: int | None) -> int:
    """Return the number of workers; "auto" means as many as there are GPUs for."""
    gpus = len(visible_gpus())
    count = gpus // (gpus_per_worker or 1) if workers == "auto" else workers
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            "Argument `workers` must be a positive integer, or 'auto' on a machine "
            f"with GPUs for a worker. Received: workers={workers!r} with {gpus} GPUs"
        )
    if not 0 <= count * (gpus_per_worker or 0) <= gpus:
        raise ValueError(
            f"Argument `gpus_per_worker` must be from 0 to {gpus // count}, since "
            f"{count} workers divide {gpus} GPUs. "
            f"Received: gpus_per_worker={gpus_per_worker!r}"
        )
    return count


def gpu_variables(
    rank: int, workers: int, gpus_per_worker: int | None
) -> dict[str, str]:
    """Return the variable by which a worker sees its GPUs; all if these are fewer."""
    gpus = visible_gpus()
    count = len(gpus) // workers if gpus_per_worker is None else gpus_per_worker
    if not count and gpus_per_worker is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * count :][:count])}


def available_cores() -> int:
    """Return the number of cores that this process and its children may use."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return len(affinity(0))


def free_ports(count: int, among: range | None = None) -> list[int]:
    """Find free ports that only a server can take before they are used."""
    # They are below the range from which the system assigns ports to connections. On
    # Linux other programs that call this do not find them while this process lives.
    first = ephemeral_ports()[0]
    # Some machines assign nearly all of their ports; then any must do.
    end = first if first > _LOWEST_PORT + 1_000 else 60_000
    candidates = among or range(_LOWEST_PORT, end)
    ports: list[int] = []
    for port in _random.sample(candidates, len(candidates)):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            # On every interface: a server on any of them would be in the way.
            probe.bind(("", port))
            # It hides the port from other callers.
            reservation = reserve_name(f"port {port}")
            if reservation is not None:
                _reservations.append(reservation.detach())
            if len(_reservations) > _MAX_RESERVATIONS:
                os.close(_reservations.popleft())
            ports.append(port)
    if len(ports) < count:
        raise OSError(
            f"Expected {count} free ports between {candidates.start} and "
            f"{candidates.stop - 1}. Found: {len(ports)}"
        )
    return ports
