"""What a worker of a coordinator does: it calls functions, one after the other."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.coordinator.values import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValue,
)
from keras_strategy.core.registry import get_engine

# The datasets and iterators of this process, by name. A process that was started again
# makes them anew.
_made: dict[str, Any] = {}
# One function at a time, whatever the number of threads that Dask was told to have.
_calling = threading.Lock()
_called = threading.local()


def call(name: str, parcel: bytes, backend: str) -> Any:
    """Calls a function.

    Args:
        name: The function's.
        parcel: The function and its arguments.
        backend: The Keras backend of the coordinator.

    Returns:
        What it returns, with arrays for tensors and variables.

    Raises:
        RuntimeError: If this process has another backend, or an iterator has ended.
        Exception: What the function raises.
    """
    if keras.backend.backend() != backend:
        raise RuntimeError(
            f"The coordinator has the Keras backend {backend!r}, and this worker "
            f"{keras.backend.backend()!r}. Start workers with KERAS_BACKEND={backend}."
        )
    with _calling:
        distributed = import_extra("distributed", "coordinator", "ClusterCoordinator")
        _called.worker = distributed.get_worker().name
        try:
            fn, args, kwargs = pickle.loads(parcel)
            args, kwargs = keras.tree.map_structure(_own, (list(args), kwargs))
            return keras.tree.map_structure(_as_array, fn(*args, **kwargs))
        except StopIteration as error:
            # Python would take it for the end of an iterator of its own.
            raise RuntimeError(
                f"{name} raised StopIteration: the iterator of this worker has no "
                "more. Let the dataset repeat, or schedule as often as it has batches."
            ) from error
        finally:
            del _called.worker


def experimental_get_current_worker_index() -> int:
    """Returns the index of the worker, for use in a function that was scheduled.

    Raises:
        RuntimeError: If it is called elsewhere, or the worker has no index.

    Example:

    ```python
    import keras_strategy as ks

    def my_rows(rows):
        index = ks.coordinator.experimental_get_current_worker_index()
        return rows[index::2]
    ```
    """
    name = getattr(_called, "worker", None)
    if name is None:
        raise RuntimeError(
            "`experimental_get_current_worker_index` is for functions that `schedule` "
            "or `create_per_worker_dataset` of a ClusterCoordinator was given. It was "
            "called outside of them."
        )
    if not str(name).isdigit():
        raise RuntimeError(
            f"The worker {name!r} has no index. Name Dask's workers by numbers from 0, "
            "as `dask worker --name 0` does."
        )
    return int(name)


def _own(value: Any) -> Any:
    """What this worker has in the place of an argument."""
    if isinstance(value, PerWorkerValue):
        return value.of_worker(experimental_get_current_worker_index())
    if isinstance(value, PerWorkerDataset):
        return _once(value.name, pickle.loads(value.function))
    if isinstance(value, PerWorkerIterator):
        return _once(value.name, lambda: iter(_own(value.dataset)))
    return value


def _once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _made:
        _made[name] = make()
    return _made[name]


def _as_array(value: Any) -> Any:
    if isinstance(value, keras.Variable) or get_engine().is_tensor(value):
        # A number for what has no dimensions, as NumPy has it.
        return keras.ops.convert_to_numpy(value)[()]
    return value
