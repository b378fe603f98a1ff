"""Data that can say where it is, asked while Keras's loop reads it.

There are two kinds. What is read, such as torchdata's StatefulDataLoader, has
`state_dict()` and `load_state_dict(state)`; or what its `iter` gives, as with grain's
datasets, has `get_state()` and `set_state(state)`. Keras and the engines may read
ahead: so the state is asked for after each batch that is read, and kept until it is
known with how many batches the training was.
"""

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategy.hooks.tf_data_states import TfDataState
from keras_strategy.input.sources import is_tf_dataset
from keras_strategy.rules.plain import encode, decode
from keras_strategy.workers.cluster import Cluster

# Nobody reads further ahead than this.
_AHEAD = 256


class DataState:
    """Where the data of one `fit` is.

    Args:
        data: What the user gave.
        each_batch: Whether it may be asked for the middle of an epoch.
    """

    def __init__(self, data: Any, each_batch: bool):
        self._data = data
        self._each_batch = each_batch
        self._whole = has_state(data)
        self._by_number = isinstance(data, keras.utils.PyDataset)
        self._begin: Any = None
        self._states: collections.deque[tuple[int, Any]] = collections.deque(
            maxlen=_AHEAD
        )
        self._next: tuple[int, Any] | None = None

    def begins(self, stays: bool) -> None:
        """The loop begins to read; `stays` with what it has been reading."""
        if self._whole:
            self._begin = encode(self._data.state_dict())

    def at(self, read: int, stays: bool) -> list[Any] | None:
        """Where the data is, of JSON's values.

        Args:
            read: How many batches the loop has read since it began.
            stays: Whether it goes on with what it has been reading.

        Returns:
            How many batches were read, and the state then; None where it cannot say.
        """
        if self._by_number or (self._whole and not read):
            return [0, self._begin if read else encode(self._data.state_dict())]
        for number, state in self._states:
            if read and number == read:
                return [number, state]
        return None

    def go_on(self, told: list[Any] | None) -> int:
        """Has the data that is read next go on from what `at` gave.

        Returns:
            How many batches need not be read again.
        """
        if told is None:
            return 0
        number, state = told
        if self._by_number or not number:
            self._data.load_state_dict(decode(state))
            self._begin = state
        else:
            self._next = number, state
        return number

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds what reads the data."""
        if self._by_number:
            yield
            return
        before = type(self._data)
        watched = _derived(
            before, {"__iter__": lambda data: self._iterate(data, before)}
        )
        object.__setattr__(self._data, "__class__", watched)
        try:
            yield
        finally:
            object.__setattr__(self._data, "__class__", before)

    def _iterate(self, data: Any, kind: Any) -> Any:
        self._states.clear()
        then, self._next = self._next, None
        number, state = then or (0, None)
        if then is not None and self._whole:
            data.load_state_dict(decode(state))
        iterator = kind.__iter__(data)
        if not self._whole:
            if not _has(iterator, "get_state", "set_state"):
                return iterator
            if then is not None:
                iterator.set_state(decode(state))
        if not self._each_batch:
            return iterator
        of_iterator = type(iterator)

        def read(iterator):
            nonlocal number
            batch = of_iterator.__next__(iterator)
            number += 1
            told = data.state_dict() if self._whole else iterator.get_state()
            self._states.append((number, encode(told)))
            return batch

        if self._whole:
            return _Iteration(iterator, read)
        # Other iterators are made of it, which ask for more than the next batch.
        iterator.__class__ = _derived(of_iterator, {"__next__": read})
        return iterator


class _Iteration:
    """An iterator that is read in another way."""

    def __init__(self, iterator: Any, read: Any):
        self._iterator, self._read = iterator, read

    def __iter__(self) -> "_Iteration":
        return self

    def __next__(self) -> Any:
        return self._read(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def state_of(data: Any, each_batch: bool) -> DataState | TfDataState | None:
    """Where the data of a `fit` is; None for data that cannot say it.

    Args:
        data: The argument `x` of `fit`.
        each_batch: Whether it may be asked for the middle of an epoch.
    """
    if is_tf_dataset(data):
        return TfDataState(data)
    grain = sys.modules.get("grain")
    kinds = () if grain is None else (grain.IterDataset, grain.DataLoader)
    if isinstance(data, kinds) or has_state(data):
        return DataState(data, each_batch)
    return None


def told_by_this_worker(told: list[Any], cluster: Cluster | None) -> Any:
    """What this worker has said of its data in a backup.

    Args:
        told: What each of the workers has that made it.
        cluster: The workers that go on, or None.

    Raises:
        ValueError: If they said different things, and were not as many.
    """
    if all(one == told[0] for one in told):
        return told[0]
    workers = 1 if cluster is None else cluster.size
    if len(told) != workers:
        raise ValueError(
            "Every worker's own data was somewhere else, so that the training goes on "
            "with as many workers as it was interrupted with. Received: "
            f"{workers} workers, where the backup was made with {len(told)}."
        )
    return told[0 if cluster is None else cluster.rank]


def has_state(thing: Any) -> bool:
    """Whether something has `state_dict()` and `load_state_dict(state)`."""
    return _has(thing, "state_dict", "load_state_dict")


def _has(thing: Any, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def _derived(kind: type, members: dict[str, Any]) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
