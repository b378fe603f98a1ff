"""`MPIClusterResolver`: the processes that mpirun or mpiexec started."""

from __future__ import annotations

import dataclasses
import os

from keras_strategy.cluster_resolver.checks import port_number
from keras_strategy.cluster_resolver.from_environment import (
    Description,
    EnvironmentClusterResolver,
    rank_and_size,
    ranked_workers,
    required_int,
)


@dataclasses.dataclass(frozen=True)
class Flavor:
    """The variables of one family of MPI launchers."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def present(self) -> bool:
        """Whether this family's launcher started this process."""
        return bool(os.environ.get(self.rank) and os.environ.get(self.size))


FLAVORS = (
    Flavor(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI, MVAPICH: all that start by Hydra.
    Flavor(
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
)


class MPIClusterResolver(EnvironmentClusterResolver):
    """Reads the cluster from the variables of Open MPI, MPICH or Intel MPI.

    These are OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, or PMI_RANK and
    PMI_SIZE. Every process is a worker, and its rank is its index. MPI itself is
    not used.

    No launcher tells the host of rank 0. It is `coordinator_address`, or else
    MASTER_ADDR, or else this host where all processes are on one. The addresses
    of workers on other hosts are empty strings.

    Args:
        coordinator_address: The host (or `"host:port"`) of rank 0, the same on
            all workers.
        port_base: The port of rank 0 where `coordinator_address` names none.
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
        """The index of this process on its host; `None` where not told."""
        flavor = _flavor()
        if not os.environ.get(flavor.local_rank):
            return None
        return required_int(flavor.local_rank, flavor.launcher)

    def _describe(self) -> Description:
        flavor = _flavor()
        rank, size = rank_and_size(flavor.rank, flavor.size, flavor.launcher)
        local_size = 1
        if os.environ.get(flavor.local_size):
            local_size = required_int(flavor.local_size, flavor.launcher, minimum=1)
        one_host = local_size == size
        host, port = self._leader(one_host, flavor)
        # How many share rank 0's host is known only when all do.
        spec = ranked_workers(size, size if one_host else 1, host, port)
        return Description(spec, "worker", rank)

    def _leader(self, one_host: bool, flavor: Flavor) -> tuple[str, int]:
        port = self._port_base
        if port is None:
            port = port_number(os.environ.get("MASTER_PORT") or 8888, "MASTER_PORT")
        address = self._coordinator_address or os.environ.get("MASTER_ADDR")
        if address:
            return _split(address, port)
        if one_host:
            return "127.0.0.1", port
        raise RuntimeError(
            f"{flavor.launcher} does not tell on which host rank 0 runs. Expected "
            "the environment variable MASTER_ADDR on all workers (`mpirun -x "
            "MASTER_ADDR=host ...` or `mpiexec -genv MASTER_ADDR host ...`), or the "
            "argument `coordinator_address`. Received: neither"
        )


def _flavor() -> Flavor:
    for flavor in FLAVORS:
        if flavor.present:
            return flavor
    names = " or ".join(f"{f.rank} and {f.size}" for f in FLAVORS)
    raise RuntimeError(
        f"Expected the environment variables {names} to be set, as mpirun and "
        "mpiexec do. Received: neither"
    )


def _split(address: str, port: int) -> tuple[str, int]:
    """Host and port; more than one colon without brackets is an IPv6 host."""
    host, colon, tail = address.rpartition(":")
    if colon and (":" not in host or host.endswith("]")) and host:
        return host, port_number(tail, "the port of `coordinator_address`")
    return address, port
