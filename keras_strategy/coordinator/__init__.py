"""One coordinator that gives functions to workers: TensorFlow's own, or on Dask's."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_strategy.core.registry import get_engine

if TYPE_CHECKING:
    from keras_strategy.coordinator.cluster_coordinator import (
        ClusterCoordinator as ClusterCoordinator,
    )
    from keras_strategy.coordinator.values import PerWorkerValue as PerWorkerValue
    from keras_strategy.coordinator.values import RemoteValue as RemoteValue
    from keras_strategy.coordinator.worker import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )

    PerWorkerValues = PerWorkerValue

# Of each name its place in tf.distribute, and the module that has ours.
_HOMES = {
    "ClusterCoordinator": ("coordinator.ClusterCoordinator", "cluster_coordinator"),
    "PerWorkerValue": ("coordinator.PerWorkerValue", "per_worker"),
    "PerWorkerValues": ("experimental.coordinator.PerWorkerValues", "per_worker"),
    "RemoteValue": ("coordinator.RemoteValue", "remote_value"),
    "experimental_get_current_worker_index": (
        "coordinator.experimental_get_current_worker_index",
        "on_worker",
    ),
}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    native, module = _HOMES[name]
    found = get_engine().native(native)
    if found is None:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found
