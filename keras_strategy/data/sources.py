"""Readers of every kind of dataset that `fit` takes, batch by batch.

Objects of TensorFlow, torch and other libraries are recognised by their type's name or
in `sys.modules`: importing a library only to ask would cost seconds and memory.
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


class _ThreadEpoch(threading.local):
    """The dataset that the current thread reads, and the epoch of its row order."""

    dataset: "EpochOrderedDataset | None" = None
    epoch = 0


_thread = _ThreadEpoch()


class EpochOrderedDataset(keras.utils.PyDataset):
    """Dataset that counts epochs and has another row order in each.

    Iterations may overlap: a thread may prefetch beyond the end of an epoch, and two
    loops may read the dataset at once. So each keeps the epoch that it began with.
    """

    _epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that asks, else the next one."""
        return _thread.epoch if _thread.dataset is self else self._epoch

    def iterate_in_epoch_order(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches that read this dataset, all in the order of one epoch."""
        epoch = self._epoch
        iterator = iter(batches)
        while True:
            outer = _thread.dataset, _thread.epoch
            _thread.dataset, _thread.epoch = self, epoch
            try:
                batch = next(iterator, _END)
            finally:
                _thread.dataset, _thread.epoch = outer
            if batch is _END:
                return
            yield batch


def batches_of(dataset: Any, argument: str) -> Callable[[], Iterator[Any]]:
    """Return a function that starts reading a dataset from its beginning.

    Args:
        dataset: A `tf.data.Dataset`, `DataLoader`, `PyDataset`, or any other iterable
            or iterator.
        argument: The name of the dataset in errors.

    Raises:
        TypeError: If it is none of these, or is a batch rather than a dataset.
    """
    if is_tf_dataset(dataset):
        return lambda: iter(dataset.as_numpy_iterator())
    if isinstance(dataset, keras.utils.PyDataset):
        return PyDatasetReader(dataset, dataset.__getitem__)
    if isinstance(dataset, Iterator):
        return OneShotReader(dataset, argument)
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
    """Return True if a dataset is a `tf.data.Dataset`."""
    return any(
        parent.__name__ == "DatasetV2" and parent.__module__.startswith("tensorflow.")
        for parent in type(dataset).__mro__
    )


def number_of_batches(dataset: Any) -> int | None:
    """Return the number of batches, None if it is unknown or infinite."""
    try:
        if isinstance(dataset, keras.utils.PyDataset):
            return dataset.num_batches
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def has_fixed_shapes(dataset: Any) -> bool:
    """Return True if a dataset declares that all its elements have the same shapes."""
    if not is_tf_dataset(dataset):
        return False
    specs = keras.tree.flatten(dataset.element_spec)
    return all(getattr(s, "shape", None) is not None for s in specs) and all(
        spec.shape.is_fully_defined() for spec in specs
    )


def as_array(leaf: Any, argument: str) -> Any:
    """Convert a leaf of a batch to a tensor of the backend or a NumPy array.

    Args:
        leaf: An array, a tensor of any library, a number, or None.
        argument: The name of the dataset in errors.

    Raises:
        TypeError: If it is something else.
    """
    if type(leaf) is np.ndarray:  # the common case
        return leaf
    if leaf is None or get_engine().is_tensor(leaf):
        return leaf
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # a torch tensor
        return leaf.detach().cpu().numpy()
    if hasattr(leaf, "__array__") or isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    raise TypeError(
        f"Expected a batch of arrays from {argument}. Received a batch that holds "
        f"{_short(leaf)} of type {type(leaf).__name__}"
    )


def _is_batch(value: Any) -> bool:
    return isinstance(value, str | bytes | tuple | Mapping) or hasattr(value, "shape")


class PyDatasetReader:
    """Reader that starts a `PyDataset` at any batch.

    Args:
        dataset: The dataset, whose `on_epoch_begin` and `on_epoch_end` it calls.
        read: Returns the batch of an index.
    """

    def __init__(self, dataset: keras.utils.PyDataset, read: Callable[[int], Any]):
        self._dataset = dataset
        self._read = read

    def __call__(self, first: int = 0) -> Iterator[Any]:
        """Start an epoch at batch `first`."""
        dataset = self._dataset
        dataset.on_epoch_begin()
        number = number_of_batches(dataset)
        indices = itertools.count(first) if number is None else range(first, number)
        batches = map(self._read, indices)
        if isinstance(dataset, EpochOrderedDataset):
            batches = dataset.iterate_in_epoch_order(batches)
        yield from batches
        dataset.on_epoch_end()

    def skip_epochs(self, epochs: Sequence[int | None]) -> None:
        """Skip epochs without reading them: None for a complete one."""
        for batches in epochs:
            self._dataset.on_epoch_begin()
            if batches is None:
                self._dataset.on_epoch_end()


class OneShotReader:
    """Reader of an iterator or generator, which can be read only once."""

    def __init__(self, iterator: Iterator[Any], argument: str):
        self._source = self._iterator = iterator
        self._argument = argument
        self._depth = 0
        self._ended = False

    def prefetch(self, depth: int) -> None:
        """Read batches ahead; they stay available when one of the readers stops."""
        self._depth = depth
        self.reset_prefetch()

    def reset_prefetch(self) -> None:
        """Discard prefetched batches, since the iterator's position was restored."""
        if self._depth:
            self._iterator = Prefetcher(map(copy_batch, self._source), self._depth)

    def __call__(self) -> Iterator[Any]:
        """Continue reading.

        Raises:
            RuntimeError: If the iterator is exhausted.
        """
        if self._ended:
            raise RuntimeError(
                f"{self._argument} was an iterator or a generator, which gives its "
                "batches once, and they have been read. Distribute a dataset that can "
                "be read again (a list, or an object whose `__iter__` starts anew), "
                f"or a new generator for each epoch. Received: {self._source!r}"
            )
        return self._read()

    def _read(self) -> Iterator[Any]:
        # Not `yield from`, which closes the generator together with its reader.
        for batch in self._iterator:  # noqa: UP028
            yield batch
        self._ended = True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
