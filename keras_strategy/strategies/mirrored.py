"""Strategies with a copy of each variable on each device, and the default strategy."""

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.cluster.membership import Cluster, join_cluster
from keras_strategy.cluster_resolver import detect
from keras_strategy.cluster_resolver.cluster_spec import split_host_port
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import (
    ReplicaTopology,
    canonical_device,
    repeat_devices,
    resolve_devices,
)
from keras_strategy.options import CommunicationOptions, check_communication_options
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended, resolve_local_devices
from keras_strategy.training.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategy.training.resume import sync_random_states

logger = logging.getLogger("keras_strategy")


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica, where Keras places it."""

    def __init__(self):
        super().__init__(DefaultExtended(self))


class DefaultExtended(StrategyExtended):
    """Extended part without patches or devices, so that looking costs nothing."""

    def __init__(self, container_strategy: Strategy):
        self._strategy = container_strategy
        self.cluster = None
        self.custom_reducer = None
        self.topology = ReplicaTopology(("",))  # `worker_devices` resolves it on demand
        self._containers = {}
        self.assigned_in_run = weakref.WeakValueDictionary()
        group: Any = SingleReplicaGroup(container_strategy, ())
        group.scope = contextlib.nullcontext  # Keras chooses the device
        self.group = group

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The backend's default device."""
        return (get_engine().list_devices()[0],)


class OneDeviceStrategy(Strategy):
    """Strategy that places variables and computation on one device.

    Use it to develop a program for strategies. `run` returns what its function does.

    Args:
        device: A device's name, such as `"cpu:0"` or `"/gpu:1"`.

    Raises:
        ValueError: If the device does not exist.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.OneDeviceStrategy("cpu:0")
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda: 3) == 3
    ```
    """

    def __init__(self, device: str):
        self._device = device
        available = get_engine().list_devices(canonical_device(device).split(":")[0])
        super().__init__(StrategyExtended(self, resolve_devices([device], available)))


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Every device has a copy of the variables and computes on its rows of each (global)
    batch. The gradients are summed before the optimizer changes all copies alike.

    Args:
        devices: A list of device names, such as `["gpu:0", "gpu:1"]`; None for
            all local accelerators, or all (logical) CPUs if there are none.
        cross_device_ops: How gradients, `all_reduce` and `reduce` are combined: None
            for the backend's way; one of tf.distribute's, such as
            `ReductionToOneDevice()`, which only TensorFlow follows; or your own
            `CrossDeviceOps`, which is called on every backend.
        batch_statistics: The rows by which `keras.layers.BatchNormalization` normalizes
            in training. None: the global batch in `fit`, as on one device, at the cost
            of one collective per layer and pass; the local batch in `run`, as in
            tf.distribute. `"global"`: in `run`, too. `"local"`: in `fit`, too, except
            on JAX without `virtual_replicas`, where one program has all rows.
        shard: What is sharded over the devices, for models that fill a device's
            memory: `"optimizer"` for the optimizer's slots, `"parameters"` for the
            trainable weights as well, None for nothing. Results are the same.
        virtual_replicas: A number of replicas, which run on the devices in turns. It
            decides the order of all sums, so that training has the same result, to the
            bit, on any number of devices that divides it; see
            [Same bits on any number of devices](same_bits.md). None for one replica on
            each device. On JAX and torch.

    Raises:
        TypeError: If `cross_device_ops` is not a `CrossDeviceOps` of this package.
        ValueError: If `devices` is empty, has a device twice, one that does not exist,
            or several types; or if `batch_statistics`, `shard` or `virtual_replicas` is
            invalid.
        UnsupportedBackendError: If the backend cannot train, or not with this `shard`
            or with `virtual_replicas`.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    ```
    """

    def __init__(
        self,
        devices: Iterable[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        batch_statistics: str | None = None,
        shard: str | None = None,
        virtual_replicas: int | None = None,
    ):
        check_cross_device_ops(cross_device_ops)
        self._cross_device_ops = cross_device_ops
        self._set_options(batch_statistics, shard, virtual_replicas, cross_device_ops)
        self._devices = resolve_local_devices(devices)
        _log_if_in_turns(self._devices)
        devices = repeat_devices(self._devices, virtual_replicas)
        super().__init__(StrategyExtended(self, devices, cross_device_ops))


def _log_if_in_turns(devices: tuple[str, ...]) -> None:
    """Log how to train faster where the replicas of several GPUs take turns."""
    is_gpu = devices[0].startswith("gpu")
    if keras.backend.backend() == "torch" and len(devices) > 1 and is_gpu:
        logger.warning(
            "On torch, the %d replicas of one process take turns. To train in "
            "parallel, use MultiWorkerMirroredStrategy and start the program with "
            "`keras-strategy run --workers auto`, or call `keras_strategy.launch`.",
            len(devices),
        )


def connect_workers(resolver: Any, options: CommunicationOptions) -> Cluster | None:
    """Connect to the other workers; return None if this process is alone."""
    engine = get_engine()
    workers = join_cluster(resolver, options, engine.can_disconnect)
    if workers is not None:
        engine.connect(workers)
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
        "`virtual_replicas`": strategy.virtual_replicas,
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
    sync_random_states(workers)


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
        virtual_replicas: See `MirroredStrategy`. A multiple of the number of all
            workers' devices, the same on all workers.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the cluster cannot train, or does not contain this process; or
            if `batch_statistics`, `shard` or `virtual_replicas` is invalid.
        UnsupportedBackendError: As `MirroredStrategy` does.
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
        virtual_replicas: int | None = None,
    ):
        self._set_options(batch_statistics, shard, virtual_replicas)
        self._communication_options = communication_options
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
        workers = connect_workers(cluster_resolver, options)
        devices = tuple(get_engine().list_devices())
        if workers is not None:
            devices = _local_devices(devices, workers)
            check_workers_agree(self, workers, devices)
        size = 1 if workers is None else workers.size
        devices = repeat_devices(devices, virtual_replicas, size)
        super().__init__(StrategyExtended(self, devices, cluster=workers))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the workers, or None."""
        return self._cluster_resolver


def _local_devices(devices: tuple[str, ...], workers: Cluster) -> tuple[str, ...]:
    """Return this worker's GPUs, where the workers of a machine see the same ones."""
    hosts = [split_host_port(address)[0] for address in workers.addresses]
    host = hosts[workers.rank]
    neighbours = [rank for rank, other in enumerate(hosts) if host and other == host]
    if keras.backend.backend() != "torch" or len(set(hosts)) == len(hosts):
        return devices
    visible = workers.exchange(
        "the workers' GPUs", os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    is_shared = all(visible[rank] == visible[workers.rank] for rank in neighbours)
    share = len(devices) // len(neighbours) if neighbours else 0
    if devices[0] == "cpu:0" or share == 0 or not is_shared:
        return devices
    first = neighbours.index(workers.rank) * share
    return devices[first : first + share]
