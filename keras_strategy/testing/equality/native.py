"""The strategies that Keras has without this package, for the table's column."""

from typing import Any

import keras

from keras_strategy.backends import get_backend


def peer(replicas: int) -> Any:
    """What the backend in use offers for several devices without this package.

    Args:
        replicas: The number of logical CPU devices.

    Returns:
        Something whose `scope()` a model is made and trained in, or None.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        devices = keras.distribution.list_devices("cpu")[:replicas]
        return keras.distribution.DataParallel(devices=devices)
    if backend == "tensorflow":
        return get_backend().native_strategy(
            tuple(f"cpu:{index}" for index in range(replicas))
        )
    return None
