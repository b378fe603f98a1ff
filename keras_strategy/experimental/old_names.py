"""Deprecated names of `tf.distribute.experimental`."""

import warnings
from typing import Any

from keras_strategy.options.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from keras_strategy.strategies import multi_worker, tpu


def deprecated(name: str) -> Any:
    """Return the class of a deprecated name, and warn."""
    new = {
        "CollectiveCommunication": CommunicationImplementation,
        "CollectiveHints": CommunicationOptions,
    }[name]
    _warn(name, f"keras_strategy.experimental.{new.__name__}", stacklevel=4)
    return CollectiveHints if name == "CollectiveHints" else new


class CollectiveHints(CommunicationOptions):
    """Deprecated name of `CommunicationOptions`.

    Args:
        bytes_per_pack: See `CommunicationOptions`.
        timeout_seconds: See `CommunicationOptions`.
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None):
        super().__init__(bytes_per_pack, timeout_seconds)


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
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
        _warn(
            "MultiWorkerMirroredStrategy", "keras_strategy.MultiWorkerMirroredStrategy"
        )
        self._communication = communication
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)

    def __reduce__(self):
        return type(self), (self._communication, self.cluster_resolver)


class TPUStrategy(tpu.TPUStrategy):
    """Deprecated form of `keras_strategy.TPUStrategy`.

    Args:
        tpu_cluster_resolver: See `keras_strategy.TPUStrategy`.
        device_assignment: The `experimental_device_assignment` of
            `keras_strategy.TPUStrategy`.
    """

    def __init__(self, tpu_cluster_resolver: Any = None, device_assignment: Any = None):
        _warn("TPUStrategy", "keras_strategy.TPUStrategy")
        super().__init__(tpu_cluster_resolver, device_assignment)

    def __reduce__(self):
        return type(self), (self._resolver, self._assignment)


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(
        f"tf.distribute deprecates `experimental.{old}`. Use `{new}`.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
