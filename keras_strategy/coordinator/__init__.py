"""Coordinator that schedules functions on workers: TensorFlow's own, or Dask's."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_strategy.core.registry import get_engine

if TYPE_CHECKING:
    from keras_strategy.coordinator.cluster_coordinator import (
        ClusterCoordinator as ClusterCoordinator,
    )
    from keras_strategy.coordinator.cluster_coordinator import (
        RemoteValue as RemoteValue,
    )
    from keras_strategy.coordinator.worker import PerWorkerValue as PerWorkerValue
    from keras_strategy.coordinator.worker import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )

    PerWorkerValues = PerWorkerValue

# For each name: its name in tf.distribute, and our module.
_HOMES = {
    "ClusterCoordinator": ("coordinator.ClusterCoordinator", "cluster_coordinator"),
    "PerWorkerValue": ("coordinator.PerWorkerValue", "worker"),
    "PerWorkerValues": ("experimental.coordinator.PerWorkerValues", "worker"),
    "RemoteValue": ("coordinator.RemoteValue", "cluster_coordinator"),
    "experimental_get_current_worker_index": (
        "coordinator.experimental_get_current_worker_index",
        "worker",
    ),
}

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    native, module = _HOMES[name]
    found = get_engine().native(native)
    if found is None:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found
