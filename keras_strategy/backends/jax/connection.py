"""Connection of a cluster's processes by `jax.distributed`."""

import atexit
import contextlib
import functools
import os
import socket
from collections.abc import Iterator

import jax
import jax.extend.backend

from keras_strategy.cluster.membership import Cluster
from keras_strategy.options import CommunicationImplementation

_PORT = "the port of JAX's coordinator"
# JAX's timeout ends the process. Our watchdog detects failures sooner and reports the
# cause, so JAX waits longer.
_EXTRA_TIMEOUT_SECONDS = 120
# A finished worker waits until the other workers finish.
_SHUTDOWN_TIMEOUT_SECONDS = 7 * 24 * 3600


def connect(cluster: Cluster) -> None:
    """Connect this process to the other processes of a cluster, once.

    Raises:
        RuntimeError: If JAX is initialized already, or for a different cluster.
        ValueError: If NCCL is requested without GPUs.
    """
    if jax.distributed.is_initialized():
        _check_same_cluster(cluster)
        return
    # Before JAX creates devices, which would be of this process only.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _disable_preemption_service()
    with _port(cluster) as port:
        host = "127.0.0.1"
        if not (cluster.is_local or cluster.is_chief):
            host = cluster.addresses[0].rpartition(":")[0]
        seconds = int(cluster.client.timeout_seconds) + _EXTRA_TIMEOUT_SECONDS
        try:
            jax.distributed.initialize(
                coordinator_address=f"{host}:{port}",
                num_processes=cluster.size,
                process_id=cluster.rank,
                coordinator_bind_address=(
                    f"127.0.0.1:{port}" if cluster.is_local else f"[::]:{port}"
                ),
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=seconds,
                shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_SECONDS,
            )
        except RuntimeError as error:
            if "must be called before" not in str(error):
                raise
            raise RuntimeError(
                "JAX has used its devices already, so this process cannot become one "
                f"of {cluster.size} workers. Create the multi-worker strategy before "
                "the first tensor, variable or other strategy, at the top of the "
                "program."
            ) from error
    if cluster.is_chief:
        # The chief hosts JAX's coordinator, which the others need until they end.
        cluster.client.on_leave(jax.distributed.shutdown)
    if cluster.is_local:
        _bind_gloo_to_loopback()
    nccl = cluster.options.implementation is CommunicationImplementation.NCCL
    if nccl and jax.default_backend() != "gpu":
        raise ValueError(
            "CommunicationImplementation.NCCL needs GPUs, but JAX's devices are of "
            f"kind '{jax.default_backend()}'. Use AUTO or RING."
        )


@atexit.register
def _shut_down() -> None:
    """Wait for the other processes, which JAX would end otherwise.

    Registered before this process joins a cluster, so it runs after this worker has
    reported to the coordinator that it ends.
    """
    jax.distributed.shutdown()


def _check_same_cluster(cluster: Cluster) -> None:
    rank, size = jax.process_index(), jax.process_count()
    if (rank, size) != (cluster.rank, cluster.size):
        raise RuntimeError(
            "jax.distributed was initialized for a different cluster: this is process "
            f"{rank} of {size}, but the cluster resolver reports rank {cluster.rank} "
            f"of {cluster.size}. Leave the initialization to the strategy, or "
            "initialize it for the same workers."
        )


@contextlib.contextmanager
def _port(cluster: Cluster) -> Iterator[int]:
    """Context manager that reserves the coordinator's port on the chief."""
    if not cluster.is_chief:
        yield int(cluster.exchange(_PORT, None)[0])
        return
    with socket.socket() as reserved:
        # gRPC, which sets this option too, can bind the reserved port.
        if hasattr(socket, "SO_REUSEPORT"):
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1" if cluster.is_local else "", 0))
        port = reserved.getsockname()[1]
        cluster.exchange(_PORT, port)
        yield port


def _disable_preemption_service() -> None:
    """Prevent JAX from catching SIGTERM, unless the environment enables its service.

    JAX's preemption service would keep the worker running until it is killed. See
    `BackupAndRestore`.
    """
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        with contextlib.suppress(AttributeError):  # a JAX without this setting
            jax.config.update("jax_enable_preemption_service", False)


def _bind_gloo_to_loopback() -> None:
    """Make gloo listen on the loopback interface instead of the host's address.

    JAX has no public setting for this. If its private modules have moved, gloo listens
    on the host's address.
    """
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        make_client = functools.partial(
            _cpu_client,
            xla_bridge.make_cpu_client,
            _jax.make_gloo_tcp_collectives,
            distributed.global_state.client,
        )
        jax.extend.backend.register_backend_factory(
            "cpu", make_client, priority=0, fail_quietly=False
        )
    except (ImportError, AttributeError):
        pass


def _cpu_client(make, collectives, client):
    try:
        loopback = collectives(distributed_client=client, hostname="127.0.0.1")
    except TypeError:
        return make()
    return make(collectives=loopback)
