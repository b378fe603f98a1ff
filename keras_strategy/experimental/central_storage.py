"""Variables on one device, computation on several."""

from collections.abc import Iterable

from keras_strategy.core.registry import get_engine
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended
from keras_strategy.values.devices import resolve_devices


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices, of variables that one device keeps.

    It trains as `MirroredStrategy` does, to the same weights. Between steps the weights
    and what the optimizer keeps of them are on the parameter device, by default in the
    host's memory. A step copies them to each device that computes, and brings back what
    it has made of them: so it is slower, and what it saves is the memory of devices
    between steps, not within one.

    Args:
        compute_devices: A list of device names, one replica each; None for all local
            accelerators, or all (logical) CPUs where there is none.
        parameter_device: The device that keeps the variables; None for the CPU, or for
            the only compute device where there is one alone.

    Raises:
        ValueError: If a device is not there or named twice; or if `parameter_device` is
            another one than the only compute device.
        UnsupportedBackendError: If the Keras backend in use cannot train.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.experimental.CentralStorageStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    assert strategy.extended.parameter_devices == ("cpu:0",)
    ```
    """

    def __init__(
        self,
        compute_devices: Iterable[str] | None = None,
        parameter_device: str | None = None,
    ):
        engine = get_engine()
        there_is = [*engine.list_devices(), *engine.list_devices("cpu")]
        there_is = list(dict.fromkeys(there_is))
        if compute_devices is None:
            devices = resolve_devices(None, engine.list_devices())
        else:
            if not isinstance(compute_devices, str):
                compute_devices = list(compute_devices)
            devices = resolve_devices(compute_devices, there_is)
        if parameter_device is None:
            home = devices[0] if len(devices) == 1 else "cpu:0"
        else:
            (home,) = resolve_devices([parameter_device], there_is)
        if len(devices) == 1 and home != devices[0]:
            raise ValueError(
                "Argument `parameter_device` must be the compute device where there is "
                "one alone: with one replica nothing is added to Keras, which computes "
                "where the variables are. Name a further compute device, or leave "
                f"`parameter_device` out. Received: parameter_device="
                f"{parameter_device!r} with compute_devices={list(devices)}"
            )
        self._parameter_device = home
        super().__init__(StrategyExtended(self, devices))

    def __reduce__(self):
        return type(self), (list(self.extended.worker_devices), self.parameter_device)
