"""`RemoteValue`: what a function will have returned.

What each worker has one of: values, datasets and their iterators.
"""

import dataclasses
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras


class RemoteValue:
    """What `ClusterCoordinator.schedule` returns: the result of a function, to come.

    Example:

    ```python
    import keras_strategy as ks

    def first(value: ks.coordinator.RemoteValue):
        return value.fetch()
    ```
    """

    def fetch(self) -> Any:
        """Waits for the function, and returns its result with arrays for tensors.

        Raises:
            CancelledError: If the function was cancelled, since another one failed.
            Exception: What the function raised.
        """
        raise NotImplementedError

    def get(self) -> Any:
        """Waits for the function, and returns its result with tensors for arrays.

        Raises:
            CancelledError: If the function was cancelled, since another one failed.
            Exception: What the function raised.
        """
        raise NotImplementedError


class Scheduled(RemoteValue):
    """The result of a function that a coordinator has given to its workers.

    Args:
        name: The function's.
    """

    def __init__(self, name: str):
        self.name = name
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def has_result(self) -> bool:
        """Whether the function has ended without an error."""
        return self._ended.is_set() and self._error is None

    def set_result(self, result: Any) -> None:
        """Tells what the function returned."""
        self._result = result
        self._ended.set()

    def set_error(self, error: BaseException) -> None:
        """Tells why there is no result."""
        self._error = error
        self._ended.set()

    def fetch(self) -> Any:
        """See `RemoteValue`."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def get(self) -> Any:
        """See `RemoteValue`."""
        return keras.tree.map_structure(as_tensor, self.fetch())


def as_tensor(value: Any) -> Any:
    """A tensor for an array, and all else as it is."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return keras.ops.convert_to_tensor(value) if is_array else value


class PerWorkerValue:
    """Values of which each worker gets its own where a function is called with this.

    Args:
        values: One for each worker, by its index.

    Raises:
        TypeError: If the values are not in a list or tuple.

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
        """The value of a worker.

        Args:
            index: Its index.

        Raises:
            ValueError: If it has none.
        """
        if index >= len(self._values):
            raise ValueError(
                f"There are {len(self._values)} values, and none for worker {index}. "
                "Give `PerWorkerValue` one for each worker."
            )
        return self._values[index]


PerWorkerValues = PerWorkerValue


@dataclasses.dataclass(frozen=True)
class PerWorkerDataset:
    """A dataset that each worker makes for itself, when it first needs it.

    Attributes:
        function: What makes it, as it travels.
        name: What a worker knows it by.
    """

    function: bytes
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def __iter__(self) -> Iterator[Any]:
        return PerWorkerIterator(self)


@dataclasses.dataclass(frozen=True)
class PerWorkerIterator(Iterator[Any]):
    """An iterator over each worker's own dataset.

    Attributes:
        dataset: The dataset.
        name: What a worker knows the iterator by.
    """

    dataset: PerWorkerDataset
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Each worker has an iterator of its own, and the coordinator none. Call "
            "`next` in a function that is given the iterator by `schedule`."
        )
