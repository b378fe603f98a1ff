"""What this project is tested with, for programs that want to test the same."""

from keras_strategy.testing.warm_starter import WarmStarter
from keras_strategy.testing.worker_runner import (
    WorkerEnd,
    WorkerFailed,
    WorkerRunner,
    WorkerTimeout,
)

__all__ = ["WarmStarter", "WorkerEnd", "WorkerFailed", "WorkerRunner", "WorkerTimeout"]
