"""A `tf.data.Dataset` that is asked where it is.

tf.data can save an iterator. That is asked for when one has just been made, when it
holds no rows yet: what it shuffles by has been drawn then, and it is read up to where
the training goes on. What later ones draw follows from it, too, if what shuffles has
the same seeds.
"""

import contextlib
import hashlib
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from keras_strategy.rules.plain import encode, decode

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
