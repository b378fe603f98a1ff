"""Several devices of one machine, a replica on each."""

from collections.abc import Iterable

from keras_strategy.core.registry import get_engine
from keras_strategy.options.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended
from keras_strategy.values.devices import resolve_devices


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Every device holds a copy of the variables and computes on its rows of each
    batch; the gradients are summed before the optimizer changes the copies, all
    in the same way. A batch is the global batch, whatever the number of devices.

    Args:
        devices: A list of device names, such as `["gpu:0", "gpu:1"]`; None for
            all local accelerators, or all (logical) CPUs where there is none.
        cross_device_ops: How gradients and `all_reduce` add up on TensorFlow, such
            as `ReductionToOneDevice()`; None lets TensorFlow choose. JAX and torch
            decide by themselves.

    Raises:
        TypeError: If `cross_device_ops` is none of this package's choices.
        ValueError: If `devices` is empty, or holds a device that is not there,
            one twice, or several kinds.
        UnsupportedBackendError: If the Keras backend in use cannot train.

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
    ):
        check_cross_device_ops(cross_device_ops)
        self._cross_device_ops = cross_device_ops
        available = get_engine().list_devices()
        if devices is not None and not isinstance(devices, str):
            # Beside accelerators, the CPUs may be asked for by name.
            devices = list(devices)
            available = [*available, *get_engine().list_devices("cpu")]
            available = list(dict.fromkeys(available))
        devices = resolve_devices(devices, available)
        super().__init__(StrategyExtended(self, devices, cross_device_ops))

    def __reduce__(self):
        return type(self), (
            list(self.extended.worker_devices),
            self._cross_device_ops,
        )
