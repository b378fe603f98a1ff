"""Passes over one dataset, each in the order of the epoch that it began in.

The datasets that users have, read batch by batch in one way.

Keras reads the same kinds in `fit`. Engines other than the one in use are told by
the names of their types: importing one to ask would cost seconds and memory.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategy.core.registry import get_engine
from keras_strategy.data.prefetch import Prefetcher, copy_batch

_END = object()


class _Reading(threading.local):
    """The dataset that this thread reads in one order, and the epoch of that order."""

    dataset: "EpochOrderedDataset | None" = None
    epoch = 0


_reading = _Reading()


class EpochOrderedDataset(keras.utils.PyDataset):
    """A dataset that counts epochs, and has another order in each.

    Its passes need not follow each other: a thread may read ahead of an epoch's end,
    and two loops may read the dataset at once. The rows of a pass must not follow from
    what another one has come to.
    """

    _epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch that who asks reads: of its pass, else the one that comes next."""
        return _reading.epoch if _reading.dataset is self else self._epoch

    def iterate_in_epoch_order(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Gives batches of this dataset in the order that their first one had.

        Args:
            batches: What reads this dataset when it is asked for a batch.
        """
        epoch = self._epoch
        iterator = iter(batches)
        while True:
            outer = _reading.dataset, _reading.epoch
            _reading.dataset, _reading.epoch = self, epoch
            try:
                batch = next(iterator, _END)
            finally:
                _reading.dataset, _reading.epoch = outer
            if batch is _END:
                return
            yield batch


def batches_of(dataset: Any, argument: str) -> Callable[[], Iterator[Any]]:
    """Returns a function that starts reading a dataset from its beginning.

    Args:
        dataset: A `tf.data.Dataset`, `DataLoader`, `PyDataset`, or any other iterable
            or iterator.
        argument: What the dataset is called in errors.

    Raises:
        TypeError: If it is none of these, or is a batch rather than a dataset.
    """
    if is_tf_dataset(dataset):
        return lambda: iter(dataset.as_numpy_iterator())
    if isinstance(dataset, keras.utils.PyDataset):
        return IndexedStart(dataset, dataset.__getitem__)
    if isinstance(dataset, Iterator):
        return OneShotStart(dataset, argument)
    if not _is_batch(dataset) and (
        isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    ):
        return lambda: iter(dataset)
    raise TypeError(
        f"{argument} must be a dataset of batches: a tf.data.Dataset, a torch "
        "DataLoader, a keras.utils.PyDataset, a list of batches, or another iterable "
        "that gives one batch (arrays, or a tuple or dict of them) at a time. "
        f"Received: {_short(dataset)} of type {type(dataset).__name__}"
    )


def is_tf_dataset(dataset: Any) -> bool:
    """Whether a dataset is a `tf.data.Dataset`."""
    return any(
        parent.__name__ == "DatasetV2" and parent.__module__.startswith("tensorflow.")
        for parent in type(dataset).__mro__
    )


def number_of_batches(dataset: Any) -> int | None:
    """How many batches a dataset has, None if that is not known or endless."""
    try:
        if isinstance(dataset, keras.utils.PyDataset):
            return dataset.num_batches
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def has_fixed_shapes(dataset: Any) -> bool:
    """Whether a dataset promises that all its elements have the same shapes."""
    if not is_tf_dataset(dataset):
        return False
    specs = keras.tree.flatten(dataset.element_spec)
    return all(getattr(s, "shape", None) is not None for s in specs) and all(
        spec.shape.is_fully_defined() for spec in specs
    )


def as_array(leaf: Any, argument: str) -> Any:
    """Makes a tensor of the backend or a NumPy array of what a batch holds.

    Args:
        leaf: An array, a tensor of any engine, a number, or None for nothing.
        argument: What the dataset is called in errors.

    Raises:
        TypeError: If it is something else.
    """
    if type(leaf) is np.ndarray:  # mostly
        return leaf
    if leaf is None or get_engine().is_tensor(leaf):
        return leaf
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # a tensor of torch
        return leaf.detach().cpu().numpy()
    if hasattr(leaf, "__array__") or isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    raise TypeError(
        f"The batches of {argument} must be made of arrays. Received a batch that "
        f"holds {_short(leaf)} of type {type(leaf).__name__}"
    )


def _is_batch(value: Any) -> bool:
    """Whether a value is what a dataset should give rather than be."""
    return isinstance(value, str | bytes | tuple | Mapping) or hasattr(value, "shape")


class IndexedStart:
    """Starts to read a `PyDataset`, of which any batch can come first.

    Args:
        dataset: The dataset, which is told about the beginning and end of each epoch.
        read: Gives the batch of a number.
    """

    def __init__(self, dataset: keras.utils.PyDataset, read: Callable[[int], Any]):
        self._dataset = dataset
        self._read = read

    def __call__(self, first: int = 0) -> Iterator[Any]:
        """Starts to read with a batch."""
        dataset = self._dataset
        dataset.on_epoch_begin()
        number = number_of_batches(dataset)
        numbers = itertools.count(first) if number is None else range(first, number)
        batches = map(self._read, numbers)
        if isinstance(dataset, EpochOrderedDataset):
            batches = dataset.iterate_in_epoch_order(batches)
        yield from batches
        dataset.on_epoch_end()

    def skip_epochs(self, epochs: Sequence[int | None]) -> None:
        """Leaves out epochs, whose batches are not read.

        Args:
            epochs: For each, how many batches were read of it; None for all.
        """
        for batches in epochs:
            self._dataset.on_epoch_begin()
            if batches is None:
                self._dataset.on_epoch_end()


class OneShotStart:
    """An iterator or generator, whose batches are gone when they have been read."""

    def __init__(self, iterator: Iterator[Any], argument: str):
        self._given = self._iterator = iterator
        self._argument = argument
        self._depth = 0
        self._ended = False

    def read_ahead(self, depth: int) -> None:
        """Reads some batches before they are asked for; none is lost with a reader."""
        self._depth = depth
        self.forget()

    def forget(self) -> None:
        """Forgets what was read ahead: the iterator has been put somewhere else."""
        if self._depth:
            self._iterator = Prefetcher(map(copy_batch, self._given), self._depth)

    def __call__(self) -> Iterator[Any]:
        """Goes on reading.

        Raises:
            RuntimeError: If it has ended.
        """
        if self._ended:
            raise RuntimeError(
                f"{self._argument} was an iterator or a generator, which gives its "
                "batches once, and they have been read. Distribute a dataset that can "
                "be read again (a list, or an object whose `__iter__` starts anew), "
                f"or a new generator for each epoch. Received: {self._given!r}"
            )
        return self._read()

    def _read(self) -> Iterator[Any]:
        # Not `yield from`, which closes a generator when its reader is given up.
        for batch in self._iterator:  # noqa: UP028
            yield batch
        self._ended = True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
