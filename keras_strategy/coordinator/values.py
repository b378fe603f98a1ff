"""Values of a coordinator: remote results, and one value or dataset per worker."""

import dataclasses
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras


class RemoteValue:
    """Future result of a function passed to `ClusterCoordinator.schedule`.

    Example:

    ```python
    import keras_strategy as ks

    def first(value: ks.coordinator.RemoteValue):
        return value.fetch()
    ```
    """

    def fetch(self) -> Any:
        """Wait for the function and return its result, with arrays for tensors.

        Raises:
            CancelledError: If the function was cancelled because another one failed.
            Exception: The exception that the function raised.
        """
        raise NotImplementedError

    def get(self) -> Any:
        """Wait for the function and return its result, with tensors for arrays.

        Raises:
            CancelledError: If the function was cancelled because another one failed.
            Exception: The exception that the function raised.
        """
        raise NotImplementedError


class Scheduled(RemoteValue):
    """Result of a function that a coordinator has submitted."""

    def __init__(self, name: str):
        self.name = name
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def has_result(self) -> bool:
        """True if the function has returned."""
        return self._done.is_set() and self._error is None

    def set_result(self, result: Any) -> None:
        """Set the function's result."""
        self._result = result
        self._done.set()

    def set_error(self, error: BaseException) -> None:
        """Set the reason why there is no result."""
        self._error = error
        self._done.set()

    def fetch(self) -> Any:
        """Wait for the result and return it with arrays for tensors."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def get(self) -> Any:
        """Wait for the result and return it with tensors for arrays."""
        return keras.tree.map_structure(as_tensor, self.fetch())


def as_tensor(value: Any) -> Any:
    """Convert an array to a tensor; return other values unchanged."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return keras.ops.convert_to_tensor(value) if is_array else value


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
        """Return the value of the worker with this index.

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


@dataclasses.dataclass(frozen=True)
class PerWorkerDataset:
    """A dataset that each worker creates when it first needs it.

    Attributes:
        function: The serialized function that creates it.
        name: The key under which a worker stores it.
    """

    function: bytes
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def __iter__(self) -> Iterator[Any]:
        return PerWorkerIterator(self)


@dataclasses.dataclass(frozen=True)
class PerWorkerIterator(Iterator[Any]):
    """An iterator over each worker's dataset.

    Attributes:
        dataset: The dataset.
        name: The key under which a worker stores the iterator.
    """

    dataset: PerWorkerDataset
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Only workers have iterators, not the coordinator. Call `next` in a "
            "function that receives the iterator through `schedule`."
        )
