"""This worker's rows of the arrays that a `fit` is given."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks.hook import home_of
from keras_strategy.input.own_rows import LocalRows, LocalBoundsFn, rows_to_read
from keras_strategy.values.distributed import map_leaves

ArrayDataAdapter: Any = home_of(
    "ArrayDataAdapter", "keras.src.trainers.data_adapters.array_data_adapter"
).ArrayDataAdapter
array_slicing: Any = home_of(
    "convert_to_sliceable", "keras.src.trainers.data_adapters.array_slicing"
)
# What these hold is in no order of rows, or in rows of any length.
_NOT_DENSE = (
    array_slicing.JaxSparseSliceable,
    array_slicing.ScipySparseSliceable,
    array_slicing.TensorflowRaggedSliceable,
    array_slicing.TensorflowSparseSliceable,
)
# How many numbers are asked for at once: an engine takes as long for a few as for many.
_AT_ONCE = 4096


class RowsOfArrays:
    """The batches of arrays, of which this worker's rows are sliced alone.

    Keras and the engine give the order, and draw for it what they draw on one device:
    what they slice are the numbers of the rows.

    Args:
        arrays: A structure of what Keras slices.
        numbers: The rows' numbers, in arrays of a whole number of batches each.
        batch_size: How many rows a batch has.
        shuffled: Whether the numbers of a batch are others than those between the
            first and the last one.
        share: Which rows are this worker's.
        begin: Called when the first batch of an epoch is asked for: the order is then
            that of as many epochs as Keras has ended by then.
    """

    def __init__(
        self,
        arrays: Any,
        numbers: Iterable[Any],
        batch_size: int,
        shuffled: bool,
        share: LocalBoundsFn,
        begin: Callable[[], None],
    ):
        self._arrays = arrays
        self._tensors = {
            id(array)
            for array in tree.flatten(arrays)
            if array is not None and get_engine().is_tensor(array.array)
        }
        self._numbers = numbers
        self._batch_size = batch_size
        self._shuffled = shuffled
        self._share = share
        self._begin = begin

    def __iter__(self) -> Iterator[LocalRows]:
        """Starts to read."""
        # Now: to start may draw random numbers.
        return map(self._read, self._of_batches(iter(self._numbers)))

    def _of_batches(self, several: Iterator[Any]) -> Iterator[np.ndarray]:
        self._begin()
        for numbers in map(np.asarray, several):
            for first in range(0, len(numbers), self._batch_size):
                yield numbers[first : first + self._batch_size]

    def _read(self, numbers: np.ndarray) -> LocalRows:
        bounds = self._share(len(numbers))
        first, end = rows_to_read(bounds)
        rows: Any = numbers[first:end]
        if not self._shuffled:
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # which copies nothing

        def rows_of(array):
            if array is None:
                return None
            found = array[rows]
            is_tensor = id(array) in self._tensors
            return found if is_tensor else array.convert_to_numpy(found)

        return LocalRows(map_leaves(rows_of, self._arrays), bounds, len(numbers))


def rows_of_arrays(
    adapter: Any, share: LocalBoundsFn, batches_of: Callable[[Any], Iterable[Any]]
) -> RowsOfArrays | None:
    """This worker's rows of arrays, None where one cannot be sliced by rows alone.

    Args:
        adapter: Keras's adapter of the arrays.
        share: Which rows are this worker's.
        batches_of: Gives the batches of an adapter as the engine reads them.
    """
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="numpy")
    if any(isinstance(leaf, _NOT_DENSE) for leaf in tree.flatten(arrays)):
        return None
    shuffle, batch_size = adapter._shuffle, adapter.batch_size
    # Keras shuffles all rows before it makes batches, or else the rows of each batch.
    batches = 1 if shuffle == "batch" else max(1, _AT_ONCE // batch_size)
    numbers = ArrayDataAdapter(
        np.arange(adapter._num_samples),
        batch_size=batches * batch_size,
        shuffle=shuffle,
    )

    def begin():
        set_epoch(numbers, epoch_of(adapter))

    given, shuffled = batches_of(numbers), bool(shuffle)
    return RowsOfArrays(arrays, given, batch_size, shuffled, share, begin)


def epoch_of(adapter: Any) -> int | None:
    """How many epochs an adapter of Keras's has given, if its order follows from that.

    That is so since Keras 3.16; with older ones the order is drawn, and this is None.

    Args:
        adapter: The adapter, of any data.
    """
    return getattr(adapter, "_epoch", None)


def set_epoch(adapter: Any, epoch: int | None) -> None:
    """Has an adapter go on in the order of an epoch, where `epoch_of` is not None."""
    if epoch_of(adapter) is not None and epoch is not None:
        adapter._epoch = epoch
