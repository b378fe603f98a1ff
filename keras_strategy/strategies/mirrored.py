"""The strategy that is in charge outside every scope.

One device, with the interface of many.

Several devices of one machine, a replica on each.
"""

import contextlib
import functools
from collections.abc import Iterable

import keras

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.core.variable_components import ComponentOwners
from keras_strategy.devices import ReplicaTopology, canonical_device, resolve_devices
from keras_strategy.options import check_batch_statistics, check_shard
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended, check_variable
from keras_strategy.training.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategy.training.ownership import strategy_of_variable


class DefaultStrategy(Strategy):
    """What is in charge outside every scope: one replica, where Keras puts it."""

    def __init__(self):
        super().__init__(DefaultExtended(self))

    def __reduce__(self):
        return type(self), ()


class DefaultExtended(StrategyExtended):
    """Installs no hooks and asks for no device, so that a process may just look."""

    def __init__(self, container_strategy: Strategy):
        self._strategy = container_strategy
        self.cluster = None
        self.custom_reducer = None
        self._devices = ("",)  # which one is asked for when somebody wants to know
        self.topology = ReplicaTopology(self._devices)
        self._containers = ComponentOwners()
        self.group = DefaultGroup(container_strategy, ())

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that the backend takes by itself."""
        return (get_engine().list_devices()[0],)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The same."""
        return self.worker_devices

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Whether a variable was made outside of every scope."""
        check_variable("v", v)
        return strategy_of_variable(v) is None


class DefaultGroup(SingleReplicaGroup):
    """Leaves the choice of the device to Keras."""

    def scope(self):
        """Changes nothing."""
        return contextlib.nullcontext()


context.register_default_strategy(DefaultStrategy)


class OneDeviceStrategy(Strategy):
    """Puts variables and computation on one device, and changes nothing else.

    It is what a program that is written for strategies runs on while it is
    developed. `run` returns what the function returned.

    Args:
        device: A device's name, such as `"cpu:0"` or `"/gpu:1"`.

    Raises:
        ValueError: If there is no such device.

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

    Every device holds a copy of the variables and computes on its rows of each
    batch; the gradients are summed before the optimizer changes the copies, all
    in the same way. A batch is the global batch, whatever the number of devices.

    Args:
        devices: A list of device names, such as `["gpu:0", "gpu:1"]`; None for
            all local accelerators, or all (logical) CPUs where there is none.
        cross_device_ops: How gradients, `all_reduce` and `reduce` add up: None for
            the engine's way, one of tf.distribute's, such as
            `ReductionToOneDevice()`, which are TensorFlow's to follow, or a
            `CrossDeviceOps` of your own, which is called on every backend.
        batch_statistics: `"global"` has every `keras.layers.BatchNormalization` of
            models in this scope train with the statistics of the global batch, as on
            one device, for one collective of each layer in each pass. None leaves
            them to the backend: each replica's rows on torch and TensorFlow, the
            global batch in `fit` on JAX.
        shard: What is split over the devices, for models that fill a device's memory:
            `"optimizer"` for what the optimizer keeps of each weight, `"parameters"`
            for the trained weights as well. None has a copy of everything on each
            device. The weights that training ends with are the same.

    Raises:
        TypeError: If `cross_device_ops` is no `CrossDeviceOps` of this package.
        ValueError: If `devices` is empty, or holds a device that is not there,
            one twice, or several kinds; or if `batch_statistics` or `shard` is none
            of those.
        UnsupportedBackendError: If the Keras backend in use cannot train, or cannot
            split that.

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
        available = get_engine().list_devices()
        if devices is not None and not isinstance(devices, str):
            # Beside accelerators, the CPUs may be asked for by name.
            devices = list(devices)
            available = [*available, *get_engine().list_devices("cpu")]
            available = list(dict.fromkeys(available))
        devices = resolve_devices(devices, available)
        super().__init__(StrategyExtended(self, devices, cross_device_ops))

    def __reduce__(self):
        make = functools.partial(
            type(self), batch_statistics=self._batch_statistics, shard=self._shard
        )
        return make, (list(self.extended.worker_devices), self._cross_device_ops)
