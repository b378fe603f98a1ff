"""Resolvers for the variables of torchrun, MPI launchers and SageMaker."""

from __future__ import annotations

import dataclasses
import json
import os

from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    join_host_port,
    port_number,
)
from keras_strategy.cluster_resolver.environment import (
    ClusterDescription,
    EnvironmentClusterResolver,
    optional_int,
    rank_and_size,
    ranked_workers,
    required,
)

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "torchrun"


class TorchrunClusterResolver(EnvironmentClusterResolver):
    """Cluster of the variables that torchrun sets.

    These are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and optionally
    LOCAL_RANK and LOCAL_WORLD_SIZE; other launchers set them too. Every process
    is a worker, and its rank is its index.

    torchrun reports only the host of rank 0. The workers on that host get
    consecutive ports; the addresses of all others are empty strings.

    Args:
        port: The port of rank 0. Defaults to MASTER_PORT, or to the one after
            it where torchrun's own store listens on MASTER_PORT
            (TORCHELASTIC_USE_AGENT_STORE is "True").
        rpc_layer: The protocol between workers.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import TorchrunClusterResolver

    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1",
                      MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    resolver = TorchrunClusterResolver()
    assert resolver.task_id == 1
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.1:29500", ""]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ```
    """

    def __init__(self, port: int | None = None, rpc_layer: str | None = None) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._port = None if port is None else port_number(port, "`port`")

    @property
    def local_rank(self) -> int | None:
        """The index of this process on its host; `None` where it is not known."""
        return optional_int("LOCAL_RANK")

    def _describe(self) -> ClusterDescription:
        rank, size = rank_and_size("RANK", "WORLD_SIZE", _TORCHRUN)
        host = required("MASTER_ADDR", _TORCHRUN)
        port = self._port
        if port is None:
            port = port_number(required("MASTER_PORT", _TORCHRUN), "MASTER_PORT")
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                port += 1
        # torchrun starts the same number on every host.
        local_size = optional_int("LOCAL_WORLD_SIZE", minimum=1) or 1
        spec = ranked_workers(size, local_size, host, port)
        return ClusterDescription(spec, "worker", rank)


@dataclasses.dataclass(frozen=True)
class MPILauncher:
    """Variables of one family of MPI launchers."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def is_present(self) -> bool:
        """True if this family's launcher started this process."""
        return bool(os.environ.get(self.rank) and os.environ.get(self.size))


MPI_LAUNCHERS = (
    MPILauncher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI, MVAPICH: all that use Hydra.
    MPILauncher(
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
)


class MPIClusterResolver(EnvironmentClusterResolver):
    """Cluster of the variables of Open MPI, MPICH or Intel MPI.

    These are OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, or PMI_RANK and
    PMI_SIZE. Every process is a worker, and its rank is its index. MPI itself is
    not used.

    No launcher reports the host of rank 0. It is `coordinator_address`, or else
    MASTER_ADDR, or else this host where all processes are on one. The addresses
    of workers on other hosts are empty strings.

    Args:
        coordinator_address: The host (or `"host:port"`) of rank 0, the same on
            all workers.
        port_base: The port of rank 0 where `coordinator_address` has none.
            Defaults to MASTER_PORT, or else to 8888.
        rpc_layer: The protocol between workers.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import MPIClusterResolver

    os.environ.update(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4")
    resolver = MPIClusterResolver(coordinator_address="node1:2222")
    assert resolver.task_id == 3
    assert resolver.cluster_spec().task_address("worker", 0) == "node1:2222"
    del os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    ```
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        port_base: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._coordinator_address = coordinator_address
        self._port_base = None if port_base is None else port_number(port_base, "port")

    @property
    def local_rank(self) -> int | None:
        """The index of this process on its host; `None` where it is not known."""
        return optional_int(_launcher().local_rank)

    def _describe(self) -> ClusterDescription:
        launcher = _launcher()
        rank, size = rank_and_size(launcher.rank, launcher.size, launcher.name)
        local_size = optional_int(launcher.local_size, minimum=1) or 1
        is_one_host = local_size == size
        host, port = self._coordinator(is_one_host, launcher)
        # The number of workers on rank 0's host is known only if all are there.
        spec = ranked_workers(size, size if is_one_host else 1, host, port)
        return ClusterDescription(spec, "worker", rank)

    def _coordinator(self, is_one_host: bool, launcher: MPILauncher) -> tuple[str, int]:
        port = self._port_base
        if port is None:
            port = port_number(os.environ.get("MASTER_PORT") or 8888, "MASTER_PORT")
        address = self._coordinator_address or os.environ.get("MASTER_ADDR")
        if address:
            return _split(address, port)
        if is_one_host:
            return "127.0.0.1", port
        raise RuntimeError(
            f"{launcher.name} does not report the host of rank 0. Expected "
            "the environment variable MASTER_ADDR on all workers (`mpirun -x "
            "MASTER_ADDR=host ...` or `mpiexec -genv MASTER_ADDR host ...`), or the "
            "argument `coordinator_address`. Received: neither"
        )


def _launcher() -> MPILauncher:
    for launcher in MPI_LAUNCHERS:
        if launcher.is_present:
            return launcher
    names = " or ".join(f"{f.rank} and {f.size}" for f in MPI_LAUNCHERS)
    raise RuntimeError(
        f"Expected the environment variables {names} to be set, as mpirun and "
        "mpiexec do. Received: neither"
    )


def _split(address: str, port: int) -> tuple[str, int]:
    """Return host and port; several colons without brackets are an IPv6 host."""
    host, colon, tail = address.rpartition(":")
    if colon and (":" not in host or host.endswith("]")) and host:
        return host, port_number(tail, "the port of `coordinator_address`")
    return address, port


SM_HOSTS = "SM_HOSTS"
SM_CURRENT_HOST = "SM_CURRENT_HOST"


class SageMakerClusterResolver(EnvironmentClusterResolver):
    """Cluster of SageMaker's SM_HOSTS and SM_CURRENT_HOST.

    Every host of the job is a worker; they are sorted by name.

    Args:
        port: The port that every worker listens on.
        task_type: Overrides the task type.
        task_id: Overrides the task id.
        rpc_layer: The protocol between workers.
        environment: The value of the property `environment`.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import SageMakerClusterResolver

    os.environ["SM_HOSTS"] = '["algo-1", "algo-2"]'
    os.environ["SM_CURRENT_HOST"] = "algo-2"
    resolver = SageMakerClusterResolver(port=2223)
    assert resolver.cluster_spec().task_address("worker", 0) == "algo-1:2223"
    assert resolver.task_id == 1
    del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    ```
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port_number(port, "`port`")

    def _describe(self) -> ClusterDescription:
        text = required(SM_HOSTS, "a SageMaker training job")
        current = required(SM_CURRENT_HOST, "a SageMaker training job")
        try:
            hosts = json.loads(text)
        except (ValueError, RecursionError):
            hosts = None
        if not isinstance(hosts, list) or not all(
            isinstance(host, str) and host for host in hosts
        ):
            raise ValueError(
                f"Expected the environment variable {SM_HOSTS} to be a JSON list of "
                f"host names. Received: {text[:200]!r}"
            )
        hosts = sorted(hosts)
        if current not in hosts:
            # TensorFlow returns an empty cluster here, so that every host trains
            # alone and nobody notices.
            raise ValueError(
                f"Expected {SM_CURRENT_HOST} to be one of {SM_HOSTS} ({hosts}). "
                f"Received: {current!r}"
            )
        spec = ClusterSpec(
            {"worker": [join_host_port(host, self._port) for host in hosts]}
        )
        return ClusterDescription(spec, "worker", hosts.index(current))
