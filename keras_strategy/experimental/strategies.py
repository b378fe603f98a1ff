"""Central storage, and deprecated names of `tf.distribute.experimental`."""

from collections.abc import Iterable
from typing import Any

from keras_strategy.options import CommunicationImplementation, CommunicationOptions
from keras_strategy.strategies import mirrored, tpu
from keras_strategy.strategies.base import Strategy, warn_deprecated
from keras_strategy.strategies.extended import StrategyExtended, resolve_local_devices


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices, with variables stored on one device.

    It trains as `MirroredStrategy` does, to the same weights. A step copies the weights
    and the optimizer's slots from the parameter device, by default the host, to each
    compute device, and the results back. It is slower, and saves device memory between
    steps only.

    Args:
        compute_devices: A list of device names, one replica each. None for all local
            accelerators, or else all (logical) CPUs.
        parameter_device: The device that stores the variables. None for the CPU, or the
            only compute device.

    Raises:
        ValueError: If a device does not exist or is named twice; or if
            `parameter_device` differs from the only compute device.
        UnsupportedBackendError: If the current Keras backend cannot train.

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
        devices = resolve_local_devices(compute_devices)
        if parameter_device is None:
            storage = devices[0] if len(devices) == 1 else "cpu:0"
        else:
            (storage,) = resolve_local_devices([parameter_device])
        if len(devices) == 1 and storage != devices[0]:
            raise ValueError(
                "With a single compute device, argument `parameter_device` must be "
                "that device: Keras then computes where the variables are. Add a "
                "compute device, or omit `parameter_device`. Received: "
                f"parameter_device={parameter_device!r} with "
                f"compute_devices={list(devices)}"
            )
        self._compute_devices, self._parameter_device = devices, storage
        super().__init__(StrategyExtended(self, devices))


def deprecated(name: str) -> Any:
    """Return the class of a deprecated name, and warn."""
    found = new = CommunicationImplementation
    if name == "CollectiveHints":
        found, new = CollectiveHints, CommunicationOptions
    replacement = f"keras_strategy.experimental.{new.__name__}"
    warn_deprecated(f"experimental.{name}", replacement, stacklevel=4)
    return found


class CollectiveHints(CommunicationOptions):
    """Deprecated name of `CommunicationOptions`.

    Args:
        bytes_per_pack: See `CommunicationOptions`.
        timeout_seconds: See `CommunicationOptions`.
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None):
        super().__init__(bytes_per_pack, timeout_seconds)


class MultiWorkerMirroredStrategy(mirrored.MultiWorkerMirroredStrategy):
    """Deprecated form of `keras_strategy.MultiWorkerMirroredStrategy`.

    Args:
        communication: A `CommunicationImplementation` or its name.
        cluster_resolver: See `keras_strategy.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: Any = None,
    ):
        warn_deprecated(
            "experimental.MultiWorkerMirroredStrategy",
            "keras_strategy.MultiWorkerMirroredStrategy",
        )
        self._communication = communication
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class TPUStrategy(tpu.TPUStrategy):
    """Deprecated form of `keras_strategy.TPUStrategy`.

    Args:
        tpu_cluster_resolver: See `keras_strategy.TPUStrategy`.
        device_assignment: The `experimental_device_assignment` of
            `keras_strategy.TPUStrategy`.
    """

    def __init__(self, tpu_cluster_resolver: Any = None, device_assignment: Any = None):
        warn_deprecated("experimental.TPUStrategy", "keras_strategy.TPUStrategy")
        self._device_assignment = device_assignment
        super().__init__(tpu_cluster_resolver, device_assignment)
