"""Strategy for the devices of several processes, on one or more machines."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategy.cluster.membership import Cluster, join_cluster
from keras_strategy.cluster_resolver import detect
from keras_strategy.cluster_resolver.cluster_spec import split_host_port
from keras_strategy.core.registry import get_engine
from keras_strategy.data import random
from keras_strategy.options import (
    CommunicationOptions,
    check_batch_statistics,
    check_communication_options,
    check_shard,
)
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended


def connect_workers(resolver: Any, options: CommunicationOptions) -> Cluster | None:
    """Connect to the other workers; return None if this process is alone."""
    workers = join_cluster(resolver, options)
    if workers is not None:
        get_engine().connect(workers)
    return workers


def check_workers_agree(
    strategy: Strategy,
    workers: Cluster,
    devices: Sequence[str],
    chosen: dict[str, Any] | None = None,
) -> None:
    """Check that the workers agree on these and `chosen` settings; sync their seeds."""

    def version(package: str) -> str:
        return str(getattr(sys.modules[package], "__version__", None))

    backend = keras.backend.backend()
    settings = {
        "Keras backend": backend,
        "Keras version": keras.__version__,
        f"{backend} version": version(backend),
        "keras_strategy version": version("keras_strategy"),
        "number of local devices": len(devices),
        "device type": devices[0].split(":")[0],
        "`batch_statistics`": strategy.batch_statistics,
        "`shard`": strategy.shard,
        **(chosen or {}),
        "`bytes_per_pack`": workers.options.bytes_per_pack,
    }
    received = workers.exchange(f"{type(strategy).__name__}()", settings)
    for what, value in settings.items():
        values = [other.get(what) for other in received]
        if any(other != value for other in values):
            raise RuntimeError(
                f"All workers must have the same {what}. Received: "
                f"{workers.format_by_worker(values)}."
            )
    random.sync_with_chief(workers)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training of several processes, each with its own devices.

    All workers run the same program. Every device of every worker has a copy of the
    variables, with the chief's initial values, and computes on its rows of each global
    batch, as with `MirroredStrategy`: every worker passes the same batch to `fit`.

    Create it before any other use of devices. A worker that fails ends all others with
    a message that names it, see `CommunicationOptions`.

    Args:
        cluster_resolver: A `ClusterResolver` for the workers' addresses. None uses the
            environment (TF_CONFIG, torchrun, MPI, Slurm and so on); without any, there
            is one worker, and this equals `MirroredStrategy`.
        communication_options: A `CommunicationOptions`, or None.
        batch_statistics: See `MirroredStrategy`. The same on all workers.
        shard: See `MirroredStrategy`. The same on all workers, for all their devices.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the cluster cannot train, or does not contain this process; or
            if `batch_statistics` or `shard` is invalid.
        UnsupportedBackendError: If the Keras backend in use does not support `shard`.
        RuntimeError: In a notebook, with several workers; or if their settings differ.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        batch_statistics: str | None = None,
        shard: str | None = None,
    ):
        self._batch_statistics = check_batch_statistics(batch_statistics)
        options = check_communication_options(communication_options)
        if cluster_resolver is None:
            cluster_resolver = detect().resolver()
        elif not hasattr(cluster_resolver, "cluster_spec"):
            raise TypeError(
                "Argument `cluster_resolver` must be a ClusterResolver, such as "
                "`keras_strategy.cluster_resolver.TFConfigClusterResolver()`, or None. "
                f"Received: cluster_resolver={cluster_resolver!r} of type "
                f"{type(cluster_resolver).__name__}"
            )
        self._cluster_resolver = cluster_resolver
        self._shard = check_shard(shard, get_engine())
        workers = connect_workers(cluster_resolver, options)
        devices = tuple(get_engine().list_devices())
        if workers is not None:
            devices = _local_devices(devices, workers)
            check_workers_agree(self, workers, devices)
        super().__init__(StrategyExtended(self, devices, cluster=workers))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the workers, or None."""
        return self._cluster_resolver

    def __reduce__(self):
        make = functools.partial(
            type(self), batch_statistics=self._batch_statistics, shard=self._shard
        )
        return make, (self._cluster_resolver,)


def _local_devices(devices: tuple[str, ...], workers: Cluster) -> tuple[str, ...]:
    """Return this worker's share of a machine's GPUs, which torch shows to them all."""
    hosts = [split_host_port(address)[0] for address in workers.addresses]
    host = hosts[workers.rank]
    neighbours = [rank for rank, other in enumerate(hosts) if host and other == host]
    if keras.backend.backend() != "torch" or not neighbours or devices[0] == "cpu:0":
        return devices
    share = len(devices) // len(neighbours)
    if share == 0:
        return devices
    first = neighbours.index(workers.rank) * share
    return devices[first : first + share]
