"""What this project is tested with, for programs that want to test the same."""

from keras_strategy.testing.worker_runner import (
    WorkerEnd,
    WorkerFailed,
    WorkerRunner,
    WorkerTimeout,
)

__all__ = ["WorkerEnd", "WorkerFailed", "WorkerRunner", "WorkerTimeout"]
