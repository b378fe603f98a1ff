"""Worker side of a coordinator: calls functions one after the other."""

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

# Datasets and iterators of this process, by name. A restarted process recreates them.
_objects: dict[str, Any] = {}
# One function at a time, also if Dask has several threads.
_call_lock = threading.Lock()
_thread_state = threading.local()


def call(name: str, call_data: bytes, backend: str) -> Any:
    """Call a function.

    Args:
        name: The function's name.
        call_data: The serialized function and arguments.
        backend: The Keras backend of the coordinator.

    Returns:
        Its result, with arrays for tensors and variables.

    Raises:
        RuntimeError: If this process has another backend, or an iterator has ended.
        Exception: The exception that the function raises.
    """
    if keras.backend.backend() != backend:
        raise RuntimeError(
            f"The coordinator uses the Keras backend {backend!r}, and this worker "
            f"{keras.backend.backend()!r}. Start workers with KERAS_BACKEND={backend}."
        )
    with _call_lock:
        distributed = import_extra("distributed", "coordinator", "ClusterCoordinator")
        _thread_state.worker = distributed.get_worker().name
        try:
            fn, args, kwargs = pickle.loads(call_data)
            args, kwargs = keras.tree.map_structure(
                _resolve_per_worker, (list(args), kwargs)
            )
            return keras.tree.map_structure(_as_array, fn(*args, **kwargs))
        except StopIteration as error:
            # Dask's own iteration would end silently.
            raise RuntimeError(
                f"{name} raised StopIteration: the iterator of this worker is "
                "exhausted. Repeat the dataset, or schedule one call per batch."
            ) from error
        finally:
            del _thread_state.worker


def experimental_get_current_worker_index() -> int:
    """Return the index of the worker, in a function that was scheduled.

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
    name = getattr(_thread_state, "worker", None)
    if name is None:
        raise RuntimeError(
            "Call `experimental_get_current_worker_index` in a function passed to "
            "`schedule` or `create_per_worker_dataset` of a ClusterCoordinator. It was "
            "called outside of one."
        )
    if not str(name).isdigit():
        raise RuntimeError(
            f"The worker {name!r} has no index. Name Dask's workers by number from 0, "
            "with `dask worker --name 0`."
        )
    return int(name)


def _resolve_per_worker(value: Any) -> Any:
    """Replace a per-worker argument by this worker's value."""
    if isinstance(value, PerWorkerValue):
        return value.of_worker(experimental_get_current_worker_index())
    if isinstance(value, PerWorkerDataset):
        return _get_or_create(value.name, pickle.loads(value.function))
    if isinstance(value, PerWorkerIterator):
        return _get_or_create(
            value.name, lambda: iter(_resolve_per_worker(value.dataset))
        )
    return value


def _get_or_create(name: str, create: Callable[[], Any]) -> Any:
    if name not in _objects:
        _objects[name] = create()
    return _objects[name]


def _as_array(value: Any) -> Any:
    if isinstance(value, keras.Variable) or get_engine().is_tensor(value):
        # NumPy scalars for arrays without dimensions.
        return keras.ops.convert_to_numpy(value)[()]
    return value
