"""`TorchrunClusterResolver`: the processes that torchrun started."""

from __future__ import annotations

import os

from keras_strategy.cluster_resolver.checks import port_number
from keras_strategy.cluster_resolver.from_environment import (
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
