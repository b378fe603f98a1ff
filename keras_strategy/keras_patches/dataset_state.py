"""A `tf.data.Dataset` that is asked where it is.

tf.data can save an iterator. That is asked for when one has just been made, when it
holds no rows yet: what it shuffles by has been drawn then, and it is read up to where
the training goes on. What later ones draw follows from it, too, if what shuffles has
the same seeds.

Data that can say where it is, asked while Keras's loop reads it.

There are two kinds. What is read, such as torchdata's StatefulDataLoader, has
`state_dict()` and `load_state_dict(state)`; or what its `iter` gives, as with grain's
datasets, has `get_state()` and `set_state(state)`. Keras and the engines may read
ahead: so the state is asked for after each batch that is read, and kept until it is
known with how many batches the training was.
"""

import collections
import contextlib
import hashlib
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategy.cluster.membership import Cluster
from keras_strategy.data.sources import is_tf_dataset
from keras_strategy.training.resume import decode, encode

_logger = logging.getLogger("keras_strategy")
_LATER = (
    "Give `shuffle` a `seed`, or call `keras.utils.set_random_seed` before the dataset "
    "is made."
)
_NOT_ASKED = (
    "This tf.data.Dataset cannot say where it is, or be told: it calls Python, or is "
    "divided or changed before it is read. It is read again up to where the training "
    "goes on, which is exact if it gives the same batches whenever it is read."
)
State = dict[str, Any]
_numbers = itertools.count()


class TfDataState:
    """Where the `tf.data.Dataset` of one `fit` is; see `data_states.DataState`.

    Args:
        data: What the user gave.
    """

    def __init__(self, data: Any):
        self._data, self._kind = data, type(data)
        # Of the iterator that the loop reads, and of one that it reads next.
        self._read: State | None = None
        self._spare: State | None = None
        # What is read next, made before it is asked for.
        self._ready: tuple[Any, State] | None = None
        self._next: State | None = None
        # What tells whether the first iterator of two processes is the same.
        self._first = ""

    def begins(self, stays: bool) -> None:
        """The loop begins to read; `stays` with what it has been reading."""
        self._require_told()
        self._read, self._spare = self._spare if stays else None, None

    def at(self, read: int, stays: bool) -> list[Any] | None:
        """See `DataState.at`."""
        self._require_told()
        state = self._read if read else self._spare if stays else None
        if state is None and not read:
            if self._ready is None:
                made = self._made()
                if made is None:
                    return None
                self._ready = made
            state = self._ready[1]
        return None if state is None else [0, {"first": self._first, "begin": state}]

    def go_on(self, told: list[Any] | None) -> int:
        """See `DataState.go_on`."""
        if told is None:
            _logger.warning(_NOT_ASKED)
            return 0
        state = told[1]
        self._next, first = state["begin"], state["first"]
        if not self._first:
            self._ready = self._made()
        if self._first != first:
            _logger.warning(
                "The tf.data.Dataset does not shuffle by the seeds that it had before "
                "the training was interrupted. The rest of the epoch is what it would "
                "have been, and each that follows is in another order. %s",
                _LATER,
            )
        self._ready = None
        return 0

    def read_otherwise(self) -> None:
        """What goes on reads in another way than what was interrupted did."""
        _logger.warning(
            "Another backend, or one process in the place of several workers, may "
            "begin to read a tf.data.Dataset more or less often. The rest of the epoch "
            "is what it would have been; those that follow may be in another order, if "
            "it shuffles anew in each."
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds what reads the data."""
        members = {"__iter__": lambda data: self._iterate()}
        watched = type(
            self._kind.__name__,
            (self._kind,),
            {"__module__": self._kind.__module__, **members},
        )
        self._data.__class__ = watched
        try:
            yield
            self._require_told()
        finally:
            self._data.__class__ = self._kind

    def _require_told(self) -> None:
        """What is read is what goes on, and nothing that was made of it."""
        if self._next is not None:
            self._next = None
            _logger.warning(_NOT_ASKED)

    def _iterate(self) -> Any:
        made, self._ready = self._ready or self._made(), None
        if made is None:
            return self._kind.__iter__(self._data)
        iterator, state = made
        then, self._next = self._next, None
        if then is not None:
            _restore(iterator, then)
            state = then
        if self._read is None:
            self._read = state
        else:
            self._spare = state
        return iterator

    def _made(self) -> tuple[Any, State] | None:
        """An iterator, and its state; None if it has none."""
        iterator = self._kind.__iter__(self._data)
        state = _state(iterator)
        if state is None:
            return None
        if not self._first:
            told = repr(sorted(state.items())).encode()
            self._first = hashlib.blake2b(told, digest_size=16).hexdigest()
        return iterator, state


def _state(iterator: Any) -> State | None:
    """The files that tf.data saves it in, of JSON's values."""
    with _memory() as (tf, folder):
        try:
            tf.train.Checkpoint(iterator=iterator).write(f"{folder}/state")
        except tf.errors.OpError:
            return None  # Python, or something else with a state that is not its own
        contents = {}
        for name in sorted(tf.io.gfile.listdir(folder)):
            with tf.io.gfile.GFile(f"{folder}/{name}", "rb") as file:
                contents[name] = encode(file.read())
        return contents


def _restore(iterator: Any, state: State) -> None:
    with _memory() as (tf, folder):
        for name, content in state.items():
            with tf.io.gfile.GFile(f"{folder}/{name}", "wb") as file:
                file.write(decode(content))
        tf.train.Checkpoint(iterator=iterator).read(f"{folder}/state").assert_consumed()


@contextlib.contextmanager
def _memory() -> Iterator[tuple[Any, str]]:
    """TensorFlow, and a folder in its memory: who is killed leaves nothing."""
    tf = sys.modules["tensorflow"]
    folder = f"ram://keras_strategy/{next(_numbers)}"
    tf.io.gfile.makedirs(folder)
    try:
        yield tf, folder
    finally:
        tf.io.gfile.rmtree(folder)


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
