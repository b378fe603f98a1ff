"""Dataset state: where the user's data is, recorded while Keras's loop reads it.

Two protocols are supported: data with `state_dict()` and `load_state_dict(state)`, such
as torchdata's StatefulDataLoader, and data whose iterator has `get_state()` and
`set_state(state)`, such as grain's datasets. Keras and the backends may read ahead, so
the state is recorded after each batch and kept until the step count is known.

A `tf.data.Dataset` has only a checkpointable iterator. It is saved when it is new and
holds no rows: its shuffle seeds are drawn by then, and resuming reads up to the saved
batch. Later passes follow from it if the shuffle has the same seeds.
"""

import collections
import contextlib
import hashlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategy.cluster.membership import Cluster
from keras_strategy.data.sources import is_tf_dataset
from keras_strategy.errors import logger
from keras_strategy.training.resume import decode, encode

_SEED_HELP = (
    "Pass a `seed` to `shuffle`, or call `keras.utils.set_random_seed` before you "
    "create the dataset."
)
_NO_STATE = (
    "This tf.data.Dataset has no state that can be saved and restored: it calls "
    "Python, or is split or transformed before it is read. It is read again up to the "
    "batch where training resumes, which is exact if each pass gives the same batches."
)
State = dict[str, Any]
_folder_ids = itertools.count()


class TfDataState:
    """State of the `tf.data.Dataset` of one `fit`; same methods as `DataState`."""

    def __init__(self, data: Any):
        self._data, self._cls = data, type(data)
        # Of the iterator that the loop reads, and of the next one.
        self._current: State | None = None
        self._following: State | None = None
        # The next iterator, if it was created early.
        self._created: tuple[Any, State] | None = None
        # What the next iterator starts from.
        self._pending: State | None = None
        # Fingerprint of the first iterator, compared between processes.
        self._fingerprint = ""

    def start_pass(self, continues: bool) -> None:
        self._warn_if_unused()
        self._current, self._following = self._following if continues else None, None

    def state_at(self, read: int, continues: bool) -> list[Any] | None:
        self._warn_if_unused()
        if read:
            state = self._current
        else:
            state = self._following if continues else None
            if state is None:
                self._created = self._created or self._create_iterator()
                state = self._created and self._created[1]
        if state is None:
            return None
        return [0, {"first": self._fingerprint, "begin": state}]

    def restore(self, saved: list[Any] | None) -> int:
        """Restore the state of a pass, whose batches must all be read again."""
        if saved is None:
            logger.warning(_NO_STATE)
            return 0
        state = saved[1]
        self._pending, first = state["begin"], state["first"]
        if not self._fingerprint:
            self._create_iterator()
        if self._fingerprint != first:
            logger.warning(
                "The tf.data.Dataset shuffles with other seeds than before training "
                "was interrupted. The rest of the epoch is as without the "
                "interruption, but later epochs are in another order. %s",
                _SEED_HELP,
            )
        return 0

    def warn_other_reads(self) -> None:
        """Warn that resuming reads the data in a different way than before."""
        logger.warning(
            "Another backend, or one process instead of several workers, may start to "
            "read a tf.data.Dataset more or less often. The rest of the epoch is as "
            "without the interruption; later epochs may be in another order if the "
            "dataset reshuffles in each."
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with _overridden_iter(self._data, lambda data: self._iterate()):
            yield
            self._warn_if_unused()

    def _warn_if_unused(self) -> None:
        """Warn if the state was not restored because other data is read."""
        if self._pending is not None:
            self._pending = None
            logger.warning(_NO_STATE)

    def _iterate(self) -> Any:
        created, self._created = self._created or self._create_iterator(), None
        if created is None:
            return self._cls.__iter__(self._data)
        iterator, state = created
        if self._pending is not None:
            state, self._pending = self._pending, None
            _restore_iterator(iterator, state)
        if self._current is None:
            self._current = state
        else:
            self._following = state
        return iterator

    def _create_iterator(self) -> tuple[Any, State] | None:
        """Return a new iterator and its state; None if it has no state."""
        iterator = self._cls.__iter__(self._data)
        # The files in which tf.data saves an iterator, encoded for JSON.
        state = {}
        with _in_memory_folder() as (tf, folder):
            try:
                tf.train.Checkpoint(iterator=iterator).write(f"{folder}/state")
            except tf.errors.OpError:
                return None  # Python code, or another op with external state
            for name in sorted(tf.io.gfile.listdir(folder)):
                with tf.io.gfile.GFile(f"{folder}/{name}", "rb") as file:
                    state[name] = encode(file.read())
        if not self._fingerprint:
            content = repr(sorted(state.items())).encode()
            self._fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        return iterator, state


def _restore_iterator(iterator: Any, state: State) -> None:
    with _in_memory_folder() as (tf, folder):
        for name, content in state.items():
            with tf.io.gfile.GFile(f"{folder}/{name}", "wb") as file:
                file.write(decode(content))
        tf.train.Checkpoint(iterator=iterator).read(f"{folder}/state").assert_consumed()


@contextlib.contextmanager
def _in_memory_folder() -> Iterator[tuple[Any, str]]:
    """Yield TensorFlow and an in-memory folder, so a killed process leaves nothing."""
    tf = sys.modules["tensorflow"]
    folder = f"ram://keras_strategy/{next(_folder_ids)}"
    tf.io.gfile.makedirs(folder)
    try:
        yield tf, folder
    finally:
        tf.io.gfile.rmtree(folder)


# Upper bound on batches that are read ahead.
_MAX_PREFETCHED = 256


class DataState:
    """State of the data of one `fit`; within an epoch, too, if `each_batch` is True."""

    def __init__(self, data: Any, each_batch: bool):
        self._data = data
        self._each_batch = each_batch
        self._has_state_dict = has_state_dict(data)
        self._is_indexed = isinstance(data, keras.utils.PyDataset)
        self._start_state: Any = None
        self._states: collections.deque[tuple[int, Any]] = collections.deque(
            maxlen=_MAX_PREFETCHED
        )
        self._pending: tuple[int, Any] | None = None

    def start_pass(self, continues: bool) -> None:
        """Record that the loop starts to read; `continues` if it continues a pass."""
        if self._has_state_dict:
            self._start_state = encode(self._data.state_dict())

    def state_at(self, read: int, continues: bool) -> list[Any] | None:
        """Return `[number, state]` for `restore` after `read` batches, or None."""
        if self._is_indexed or (self._has_state_dict and not read):
            return [0, self._start_state if read else encode(self._data.state_dict())]
        states = dict(self._states)
        return [read, states[read]] if read in states else None

    def restore(self, saved: list[Any] | None) -> int:
        """Restore a state; return the number of batches that need not be read again."""
        if saved is None:
            return 0
        number, state = saved
        if self._is_indexed or not number:
            self._data.load_state_dict(decode(state))
            self._start_state = state
        else:
            self._pending = number, state
        return number

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which reading the data records its state."""
        if self._is_indexed:
            yield
            return
        cls = type(self._data)
        with _overridden_iter(self._data, lambda data: self._iterate(data, cls)):
            yield

    def _iterate(self, data: Any, cls: Any) -> Any:
        self._states.clear()
        pending, self._pending = self._pending, None
        number, state = pending or (0, None)
        if pending is not None and self._has_state_dict:
            data.load_state_dict(decode(state))
        iterator = cls.__iter__(data)
        if not self._has_state_dict:
            if not hasattr(iterator, "get_state"):
                return iterator
            if pending is not None:
                iterator.set_state(decode(state))
        if not self._each_batch:
            return iterator
        numbers = itertools.count(number + 1)

        def record(batch, get_state):
            self._states.append((next(numbers), encode(get_state())))
            return batch

        if self._has_state_dict:
            return (record(batch, data.state_dict) for batch in iterator)
        # Grain wraps the iterator and uses more than `__next__`.
        iterator_class = type(iterator)

        def read_next(iterator):
            return record(iterator_class.__next__(iterator), iterator.get_state)

        iterator.__class__ = _derived(iterator_class, {"__next__": read_next})
        return iterator


def dataset_state_of(data: Any, each_batch: bool) -> DataState | TfDataState | None:
    """Return the state of the argument `x` of `fit`; None for data without state."""
    if is_tf_dataset(data):
        return TfDataState(data)
    grain = sys.modules.get("grain")
    kinds = () if grain is None else (grain.IterDataset, grain.DataLoader)
    if isinstance(data, kinds) or has_state_dict(data):
        return DataState(data, each_batch)
    return None


def state_of_this_worker(states: list[Any], cluster: Cluster | None) -> Any:
    """Return this worker's dataset state, from those of the workers of a backup."""
    if all(state == states[0] for state in states):
        return states[0]
    workers = 1 if cluster is None else cluster.size
    if len(states) != workers:
        raise ValueError(
            "Each worker's dataset had a different state, so the training must resume "
            "with the same number of workers. Received: "
            f"{workers} workers, but the backup was written by {len(states)}."
        )
    return states[0 if cluster is None else cluster.rank]


def has_state_dict(thing: Any) -> bool:
    """Return True for objects with `state_dict()` and `load_state_dict(state)`."""
    names = "state_dict", "load_state_dict"
    return all(callable(getattr(thing, name, None)) for name in names)


@contextlib.contextmanager
def _overridden_iter(data: Any, iterate: Any) -> Iterator[None]:
    """Context manager in which the method `__iter__` of an object is another one."""
    cls = type(data)
    object.__setattr__(data, "__class__", _derived(cls, {"__iter__": iterate}))
    try:
        yield
    finally:
        object.__setattr__(data, "__class__", cls)


def _derived(cls: type, members: dict[str, Any]) -> type:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})
