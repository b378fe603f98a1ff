"""How the workers of a strategy meet, and what must be the same on all of them.

The devices of several processes, which may be on several machines.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategy.cluster.membership import Cluster, join_cluster
from keras_strategy.cluster_resolver import detect
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
    """Meets the other workers, and has the engines find each other; once.

    Args:
        resolver: See `join`.
        options: See `join`.

    Returns:
        The workers; None where this process trains alone.
    """
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
    """Makes sure that the workers have what must be the same, and takes the seeds.

    Args:
        strategy: The strategy, which knows its arguments by now.
        workers: The workers.
        devices: This worker's devices.
        chosen: What else was chosen, of JSON's values, by what messages call it.

    Raises:
        RuntimeError: If something is not the same on all workers.
    """
    own = {
        "Keras backend": keras.backend.backend(),
        "Keras version": keras.__version__,
        f"{keras.backend.backend()} version": _version(keras.backend.backend()),
        "keras_strategy version": _version("keras_strategy"),
        "number of local devices": len(devices),
        "kind of device": devices[0].split(":")[0],
        "`batch_statistics`": strategy.batch_statistics,
        "`shard`": strategy.shard,
        **(chosen or {}),
        "`bytes_per_pack`": workers.options.bytes_per_pack,
    }
    all_of_them = workers.exchange(f"{type(strategy).__name__}()", own)
    for what, value in own.items():
        told = [other.get(what) for other in all_of_them]
        if any(other != value for other in told):
            raise RuntimeError(
                f"All workers must have the same {what}. Received: "
                f"{workers.format_by_worker(told)}."
            )
    random.sync_with_chief(workers)


def _version(package: str) -> str:
    return str(getattr(sys.modules[package], "__version__", None))


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
