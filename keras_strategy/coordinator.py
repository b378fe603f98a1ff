"""One coordinator that gives work to workers: TensorFlow's own, refused elsewhere."""

from typing import Any

from keras_strategy.core.native import native

_HOMES = {
    "ClusterCoordinator": "coordinator.ClusterCoordinator",
    "PerWorkerValue": "coordinator.PerWorkerValue",
    "PerWorkerValues": "experimental.coordinator.PerWorkerValues",
    "RemoteValue": "coordinator.RemoteValue",
    "experimental_get_current_worker_index": (
        "coordinator.experimental_get_current_worker_index"
    ),
}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return native(_HOMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
