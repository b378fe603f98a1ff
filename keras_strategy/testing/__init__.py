"""Test utilities: real worker processes, and a simulated TPU."""

from typing import TYPE_CHECKING, Any

from keras_strategy.testing.worker_runner import (
    WorkerEnd,
    WorkerFailed,
    WorkerRunner,
    WorkerTimeout,
)

if TYPE_CHECKING:
    from keras_strategy.testing.simulated_devices import simulated_tpu

__all__ = [
    "WorkerEnd",
    "WorkerFailed",
    "WorkerRunner",
    "WorkerTimeout",
    "simulated_tpu",
]


def __getattr__(name: str) -> Any:
    if name != "simulated_tpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazy: it needs Keras, and the starters of workers do not.
    from keras_strategy.testing.simulated_devices import simulated_tpu

    return simulated_tpu
