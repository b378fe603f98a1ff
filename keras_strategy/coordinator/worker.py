"""Worker side of a coordinator: per-worker arguments, and calls one after the other."""

import dataclasses
import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.core.registry import get_engine

# Datasets and iterators of this process, by name. A restarted process recreates them.
_objects: dict[str, Any] = {}
# One function at a time, also if Dask has several threads.
_call_lock = threading.Lock()
_thread_state = threading.local()


class PerWorkerValue:
    """One value per worker; a scheduled function receives that of its worker.

    Args:
        values: One value for each worker, by its index.

    Raises:
        TypeError: If `values` is not a list or tuple.

    Example:

    ```python
    import keras_strategy as ks

    rates = ks.coordinator.PerWorkerValue([0.1, 0.2])
    ```
    """

    def __init__(self, values: Sequence[Any]):
        if not isinstance(values, list | tuple):
            raise TypeError(
                "Argument `values` must be a list or tuple with a value for each "
                f"worker. Received: values={values!r} of type {type(values).__name__}"
            )
        self._values = tuple(values)

    def of_worker(self, index: int) -> Any:
        """Return the value of one worker.

        Args:
            index: The index of the worker.

        Raises:
            ValueError: If it has none.
        """
        if index >= len(self._values):
            raise ValueError(
                f"Received {len(self._values)} values, and none for worker {index}. "
                "Pass one value per worker to `PerWorkerValue`."
            )
        return self._values[index]


PerWorkerValues = PerWorkerValue


def _unique_name() -> Any:
    """Return a field for the key under which a worker stores an object."""
    return dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


@dataclasses.dataclass(frozen=True)
class PerWorkerDataset:
    """A dataset that each worker creates by a serialized function on first use."""

    function: bytes
    name: str = _unique_name()

    def __iter__(self) -> Iterator[Any]:
        return PerWorkerIterator(self)


@dataclasses.dataclass(frozen=True)
class PerWorkerIterator(Iterator[Any]):
    """An iterator over each worker's dataset."""

    dataset: PerWorkerDataset
    name: str = _unique_name()

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Only workers have iterators, not the coordinator. Call `next` in a "
            "function that receives the iterator through `schedule`."
        )


def call(name: str, call_data: bytes, backend: str) -> Any:
    """Call a serialized function; return its result with arrays for tensors."""
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
    index = str(name).removeprefix("0-")  # as `dask worker --nworkers` names several
    if not index.isdigit():
        raise RuntimeError(
            f"The worker {name!r} has no index. Name Dask's workers by number from 0, "
            "with `dask worker --name 0`."
        )
    return int(index)


def _resolve_per_worker(value: Any) -> Any:
    if isinstance(value, PerWorkerValue):
        return value.of_worker(experimental_get_current_worker_index())
    if not isinstance(value, PerWorkerDataset | PerWorkerIterator):
        return value
    if value.name not in _objects:
        if isinstance(value, PerWorkerDataset):
            created = pickle.loads(value.function)()
        else:
            created = iter(_resolve_per_worker(value.dataset))
        _objects[value.name] = created
    return _objects[value.name]


def _as_array(value: Any) -> Any:
    if isinstance(value, keras.Variable) or get_engine().is_tensor(value):
        # NumPy scalars for arrays without dimensions.
        return keras.ops.convert_to_numpy(value)[()]
    return value


def to_tensors(structure: Any) -> Any:
    """Convert arrays to tensors; keep other values."""

    def convert(value: Any) -> Any:
        is_array = hasattr(value, "dtype") and hasattr(value, "shape")
        return keras.ops.convert_to_tensor(value) if is_array else value

    return keras.tree.map_structure(convert, structure)
