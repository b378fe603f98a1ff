"""This worker's rows of the arrays that a `fit` is given."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks.hook import home_of
from keras_strategy.input.own_rows import OwnRows, Share, first_and_end

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


class RowsOfArrays:
    """The batches of arrays, of which this worker's rows are sliced alone.

    Keras and the engine give the order, and draw for it what they draw on one device:
    what they slice are the numbers of the rows.

    Args:
        arrays: A structure of what Keras slices.
        numbers: The batches of an array of the rows' numbers.
        shuffled: Whether the numbers of a batch are others than those between the
            first and the last one.
        share: Which rows are this worker's.
    """

    def __init__(
        self, arrays: Any, numbers: Iterable[Any], shuffled: bool, share: Share
    ):
        is_tensor = get_engine().is_tensor
        self._structure = arrays
        # What Keras slices, and whether its rows are a tensor of the engine.
        self._arrays = [
            (array, array is not None and is_tensor(array.array))
            for array in tree.flatten(arrays)
        ]
        self._numbers = numbers
        self._shuffled = shuffled
        self._share = share

    def __iter__(self) -> Iterator[OwnRows]:
        """Starts to read."""
        # Now: to start may draw random numbers.
        return map(self._read, iter(self._numbers))

    def _read(self, numbers: Any) -> OwnRows:
        numbers = np.asarray(numbers)
        bounds = self._share(len(numbers))
        first, end = first_and_end(bounds)
        rows: Any = numbers[first:end]
        if not self._shuffled:
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # which copies nothing
        parts = [
            array
            if array is None
            else array[rows]
            if is_tensor
            else array.convert_to_numpy(array[rows])
            for array, is_tensor in self._arrays
        ]
        batch = tree.pack_sequence_as(self._structure, parts)
        return OwnRows(batch, bounds, len(numbers))


def rows_of_arrays(
    adapter: Any, share: Share, batches_of: Callable[[Any], Iterable[Any]]
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
    shuffle = adapter._shuffle
    numbers = ArrayDataAdapter(
        np.arange(adapter._num_samples), batch_size=adapter.batch_size, shuffle=shuffle
    )
    return RowsOfArrays(arrays, batches_of(numbers), bool(shuffle), share)
