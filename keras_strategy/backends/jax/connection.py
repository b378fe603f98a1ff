"""Devices of this process, and its connection to others by `jax.distributed`."""

import atexit
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.backend

from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster_resolver.cluster_spec import join_host_port
from keras_strategy.core.collectives import check_nccl

# JAX's timeout ends the process. Our watchdog detects failures sooner and reports the
# cause, so JAX waits longer.
_EXTRA_TIMEOUT_SECONDS = 120
# A finished worker waits until the other workers finish.
_SHUTDOWN_TIMEOUT_SECONDS = 7 * 24 * 3600


def connect(cluster: Cluster) -> None:
    if jax.distributed.is_initialized():
        rank, size = jax.process_index(), jax.process_count()
        if (rank, size) != (cluster.rank, cluster.size):
            raise RuntimeError(
                "jax.distributed was initialized for a different cluster: this is "
                f"process {rank} of {size}, but the cluster resolver reports rank "
                f"{cluster.rank} of {cluster.size}. Leave the initialization to the "
                "strategy, or initialize it for the same workers."
            )
        return
    # Before JAX creates devices, which would be of this process only.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would keep the worker running until it is killed.
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)
    with _address(cluster) as address:
        port = address.rpartition(":")[2]
        seconds = int(cluster.client.timeout_seconds) + _EXTRA_TIMEOUT_SECONDS
        try:
            with cluster.client.track_operation("the connection to JAX's coordinator"):
                jax.distributed.initialize(
                    coordinator_address=address,
                    num_processes=cluster.size,
                    process_id=cluster.rank,
                    coordinator_bind_address=(
                        address if cluster.is_local else f"[::]:{port}"
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
    _bind_gloo(cluster.host)
    check_nccl(cluster, jax.default_backend() == "gpu", "JAX")


@atexit.register
def _shut_down() -> None:
    """Wait for the other processes, which JAX would end otherwise."""
    # Registered before this process joins a cluster, so it runs after this worker has
    # reported to the coordinator that it ends.
    jax.distributed.shutdown()


@contextlib.contextmanager
def _address(cluster: Cluster) -> Iterator[str]:
    """Context manager that reserves the coordinator's address on the chief."""
    with contextlib.ExitStack() as reserved:
        # gloo listens on a port of each worker as well.
        with cluster.listen(backlog=cluster.size + 16) as listener:
            port = listener.getsockname()[1]
            own = join_host_port(cluster.host, port)
            address = cluster.exchange_addresses("JAX", own)[0]
        if cluster.is_chief:
            holder = reserved.enter_context(socket.socket())
            # gRPC, which sets this option too, can bind the reserved port.
            if hasattr(socket, "SO_REUSEPORT"):
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("127.0.0.1" if cluster.is_local else "", port))
        yield address


def _bind_gloo(host: str) -> None:
    """Make gloo listen at `host` instead of the address of this machine's name."""
    try:  # JAX has no public setting; without its private modules nothing changes
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        client = distributed.global_state.client
        make_cpu_client = xla_bridge.make_cpu_client
        make_collectives = _jax.make_gloo_tcp_collectives

        def make_client():
            collectives = make_collectives(distributed_client=client, hostname=host)
            return make_cpu_client(collectives=collectives)

        jax.extend.backend.register_backend_factory(
            "cpu", make_client, priority=0, fail_quietly=False
        )
    except (ImportError, AttributeError):
        pass


def list_devices(device_type: str | None = None) -> list[str]:
    kind = (device_type or jax.default_backend()).lower()
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError:  # JAX has no devices of that kind
        return []
    # Not the device's id, which counts the devices of all processes.
    return [f"{_kind_of(device)}:{i}" for i, device in enumerate(devices)]


def tpu_coordinates() -> list[tuple[int, int, int, int]]:
    try:
        devices: list[Any] = jax.local_devices(backend="tpu")
    except RuntimeError:
        return []
    return [(*device.coords, device.core_on_chip) for device in devices]


def device_named(name: str, worker: int | None = None) -> Any:
    """Return the device with a canonical name, of this worker or the one of a rank."""
    kind, _, index = name.partition(":")
    devices = jax.local_devices(worker, backend=kind)
    if int(index) < len(devices):
        return devices[int(index)]
    raise ValueError(
        f"There is no device '{name}'. Available devices: {list_devices(kind)}"
    )


def name_of(device: Any) -> str:
    kind = _kind_of(device)
    return f"{kind}:{jax.local_devices(backend=kind).index(device)}"


def set_logical_devices(device_type: str, count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        current = len(list_devices("cpu"))
        if current == count:
            return
        raise RuntimeError(
            f"The CPU cannot be split into {count} logical devices, because JAX is "
            f"already initialized with {current}. Call set_logical_devices before "
            "you create the first tensor, variable or strategy (in a notebook, restart "
            "the kernel), or set the environment variable "
            f"KERAS_STRATEGY_LOGICAL_CPUS={count} before Python starts."
        ) from error


def _kind_of(device: Any) -> str:
    platform = str(device.platform)
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
