"""Strategies for the devices of one process, and the default strategy."""

import contextlib
import functools
from collections.abc import Iterable

import keras

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import ReplicaTopology, canonical_device, resolve_devices
from keras_strategy.options import check_batch_statistics, check_shard
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import (
    StrategyExtended,
    check_variable,
    resolve_local_devices,
)
from keras_strategy.training.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategy.training.ownership import strategy_of_variable


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica, where Keras places it."""

    def __init__(self):
        super().__init__(DefaultExtended(self))

    def __reduce__(self):
        return type(self), ()


class DefaultExtended(StrategyExtended):
    """Extended part without patches or devices, so that looking costs nothing."""

    def __init__(self, container_strategy: Strategy):
        self._strategy = container_strategy
        self.cluster = None
        self.custom_reducer = None
        self.topology = ReplicaTopology(("",))  # `worker_devices` resolves it on demand
        self._containers = {}
        self.group = DefaultGroup(container_strategy, ())

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The backend's default device."""
        return (get_engine().list_devices()[0],)

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Return True if a variable was created outside every scope."""
        check_variable("v", v)
        return strategy_of_variable(v) is None


class DefaultGroup(SingleReplicaGroup):
    """Replica group that leaves the device to Keras."""

    def scope(self):
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()


context.register_default_strategy(DefaultStrategy)


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
        available = get_engine().list_devices(canonical_device(device).split(":")[0])
        super().__init__(StrategyExtended(self, resolve_devices([device], available)))

    def __reduce__(self):
        return type(self), (self.extended.worker_devices[0],)


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
        batch_statistics: `"global"` makes every `keras.layers.BatchNormalization` of
            models in this scope train with the statistics of the global batch, as on
            one device, at the cost of one collective per layer and pass. None: those of
            the local batch on torch and TensorFlow, of the global one in `fit` on JAX.
        shard: What is sharded over the devices, for models that fill a device's
            memory: `"optimizer"` for the optimizer's slots, `"parameters"` for the
            trainable weights as well, None for nothing. Results are the same.

    Raises:
        TypeError: If `cross_device_ops` is not a `CrossDeviceOps` of this package.
        ValueError: If `devices` is empty, has a device twice, one that does not exist,
            or several types; or if `batch_statistics` or `shard` is invalid.
        UnsupportedBackendError: If the backend cannot train, or not with this `shard`.

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
    ):
        check_cross_device_ops(cross_device_ops)
        self._batch_statistics = check_batch_statistics(batch_statistics)
        self._cross_device_ops = cross_device_ops
        self._shard = check_shard(shard, get_engine())
        devices = resolve_local_devices(devices)
        super().__init__(StrategyExtended(self, devices, cross_device_ops))

    def __reduce__(self):
        make = functools.partial(
            type(self), batch_statistics=self._batch_statistics, shard=self._shard
        )
        return make, (list(self.extended.worker_devices), self._cross_device_ops)
