"""The devices of several processes, which may be on several machines."""

import functools
from typing import Any

import keras

from keras_strategy.cluster_resolver import detect
from keras_strategy.core.registry import get_engine
from keras_strategy.options.batch_statistics import check_batch_statistics
from keras_strategy.options.communication import (
    CommunicationOptions,
    check_communication_options,
)
from keras_strategy.options.shard import check_shard
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended
from keras_strategy.strategies.workers import check_workers_agree, connect_workers
from keras_strategy.workers.cluster import Cluster


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training of several processes, each with its own devices.

    All workers run the same program. Every device of every worker holds a copy of the
    variables and computes on its rows of each batch, as with `MirroredStrategy`; the
    initial values are the chief's. A batch is the global batch: every worker gives
    the same one to `fit`, and computes on its own rows of it.

    Make it before any other use of devices. A worker that fails ends all others with
    a message that names it, see `CommunicationOptions`.

    Args:
        cluster_resolver: A `ClusterResolver` that tells who the workers are. None
            takes what the environment tells (TF_CONFIG, torchrun, MPI, Slurm and so
            on); without any there is one worker, and this is `MirroredStrategy`.
        communication_options: A `CommunicationOptions`, or None.
        batch_statistics: See `MirroredStrategy`. The same on all workers.
        shard: See `MirroredStrategy`. The same on all workers, whose devices share
            what is split.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If the cluster cannot be trained on, or this process is none of
            its workers; or if `batch_statistics` or `shard` is none of those.
        UnsupportedBackendError: If the Keras backend in use cannot split that.
        RuntimeError: In a notebook, where there are several workers; or if the
            workers differ in what must be the same.

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
        backend = get_engine()
        self._shard = check_shard(shard, backend)
        workers = connect_workers(cluster_resolver, options)
        devices = tuple(backend.list_devices())
        if workers is not None:
            devices = _own_devices(devices, workers)
            check_workers_agree(self, workers, devices)
        super().__init__(StrategyExtended(self, devices, cluster=workers))

    @property
    def cluster_resolver(self) -> Any:
        """What told who the workers are, or None."""
        return self._cluster_resolver

    def __reduce__(self):
        make = functools.partial(
            type(self), batch_statistics=self._batch_statistics, shard=self._shard
        )
        return make, (self._cluster_resolver,)


def _own_devices(devices: tuple[str, ...], workers: Cluster) -> tuple[str, ...]:
    """The devices of this worker, where workers share a machine's GPUs.

    torch shows all of them to every process, and one each is what launchers intend.
    """
    host = workers.addresses[workers.rank].rpartition(":")[0]
    neighbours = [
        rank
        for rank, address in enumerate(workers.addresses)
        if host and address.rpartition(":")[0] == host
    ]
    count = len(neighbours)
    if keras.backend.backend() != "torch" or count < 2 or devices[0] == "cpu:0":
        return devices
    share = len(devices) // count
    if share == 0:
        return devices
    first = neighbours.index(workers.rank) * share
    return devices[first : first + share]
