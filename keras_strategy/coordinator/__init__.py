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
    from keras_strategy.coordinator.worker import PerWorkerValue as PerWorkerValues  # noqa: F401
    from keras_strategy.coordinator.worker import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )

# The module of each name.
_HOMES = {
    "ClusterCoordinator": "cluster_coordinator",
    "PerWorkerValue": "worker",
    "PerWorkerValues": "worker",
    "RemoteValue": "cluster_coordinator",
    "experimental_get_current_worker_index": "worker",
}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    scope = "experimental." * (name == "PerWorkerValues")
    found = get_engine().native(f"{scope}coordinator.{name}")
    if found is None:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
