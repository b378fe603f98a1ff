"""`RemoteValue`: what a function will have returned."""

import threading
from typing import Any

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
