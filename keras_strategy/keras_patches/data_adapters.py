"""Patches and adapters for the data that Keras's `fit`, `evaluate` and `predict` read.

For arrays, Keras and the backend determine the order with one device's random numbers:
they slice row indices, from which each worker reads only its local rows.
"""

import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import LocalRows, override
from keras_strategy.data import splitting
from keras_strategy.data.prefetch import Prefetcher, Scope, copy_batch
from keras_strategy.data.sources.iterable import as_array
from keras_strategy.data.sources.kinds import find_source
from keras_strategy.data.sources.torch_loader import loader_with_rows
from keras_strategy.data.worker_batches import PerWorkerBatches, SynchronizedBatches
from keras_strategy.keras_patches.patch import find_module, hook
from keras_strategy.training.row_weights import LocalBoundsFn, rows_to_read
from keras_strategy.values import map_leaves

keras_adapters: Any = find_module(
    "ArrayDataAdapter PyDatasetAdapter GeneratorDataAdapter TorchDataLoaderAdapter "
    "TFDatasetAdapter",
    "keras.src.trainers.data_adapters",
)
array_slicing: Any = find_module(
    "convert_to_sliceable", "keras.src.trainers.data_adapters.array_slicing"
)
adapter_utils: Any = find_module(
    "class_weight_to_sample_weights",
    "keras.src.trainers.data_adapters.data_adapter_utils",
)
# Not sliceable by rows: sparse or ragged.
_NOT_DENSE = (
    array_slicing.JaxSparseSliceable,
    array_slicing.ScipySparseSliceable,
    array_slicing.TensorflowRaggedSliceable,
    array_slicing.TensorflowSparseSliceable,
)
# Row indices per request: a backend is as fast for many as for a few.
_INDICES_PER_REQUEST = 4096


class RowsOfArrays:
    """Batches of arrays of which this worker slices only its local rows."""

    def __init__(
        self,
        adapter: Any,
        arrays: Any,  # sliceable ones, as Keras makes them of the adapter's
        local_bounds: LocalBoundsFn,
        batches_of: Callable[[Any], Iterable[Any]],
    ):
        self._adapter, self._arrays = adapter, arrays
        self._local_bounds = local_bounds
        self._tensors = {
            id(array)
            for array in tree.flatten(arrays)
            if array is not None and get_engine().is_tensor(array.array)
        }
        shuffle, batch_size = adapter._shuffle, adapter.batch_size
        # Keras shuffles either all rows before batching, or the rows of each batch.
        batches = 1
        if shuffle != "batch":
            batches = max(1, _INDICES_PER_REQUEST // batch_size)
        self._indices = keras_adapters.ArrayDataAdapter(
            np.arange(adapter._num_samples),
            batch_size=batches * batch_size,
            shuffle=shuffle,
        )
        self._index_arrays = batches_of(self._indices)

    def __iter__(self) -> Iterator[LocalRows]:
        # Not lazily: starting may draw random numbers.
        return map(self._read, self._index_batches(iter(self._index_arrays)))

    def _index_batches(self, index_arrays: Iterator[Any]) -> Iterator[np.ndarray]:
        set_epoch(self._indices, epoch_of(self._adapter))
        batch_size = self._adapter.batch_size
        for indices in map(np.asarray, index_arrays):
            for first in range(0, len(indices), batch_size):
                yield indices[first : first + batch_size]

    def _read(self, indices: np.ndarray) -> LocalRows:
        bounds = self._local_bounds(len(indices))
        first, end = rows_to_read(bounds)
        rows: Any = indices[first:end]
        if not self._adapter._shuffle:  # consecutive
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # a view

        def slice_rows(array):
            if array is None:
                return None
            found = array[rows]
            is_tensor = id(array) in self._tensors
            return found if is_tensor else array.convert_to_numpy(found)

        return LocalRows(map_leaves(slice_rows, self._arrays), bounds, len(indices))


def epoch_of(adapter: Any) -> int | None:
    """Return the number of epochs a Keras adapter has ended, if that sets the order."""
    # That is so since Keras 3.16. Older versions draw the order.
    return getattr(adapter, "_epoch", None)


def set_epoch(adapter: Any, epoch: int | None) -> None:
    """Continue in the order of an epoch, where `epoch_of` is not None."""
    if epoch_of(adapter) is not None and epoch is not None:
        adapter._epoch = epoch


@hook(keras_adapters.PyDatasetAdapter, "_get_iterator", "(self)")
def _get_iterator(original, self):
    """Keep one order for a pass over an `IndexedDataset`, also when reading ahead."""
    # Keras ends the epoch of a dataset while TensorFlow may still read in a thread.
    dataset = self.py_dataset
    if isinstance(dataset, _SkippingDataset):
        dataset = dataset.dataset
    return find_source(dataset).in_order(original(self))


def for_keras(argument: Any, strategy: Any, method: str) -> Any:
    """Convert an argument of `fit` or a similar method to data that Keras can read."""
    data = splitting.keras_dataset(argument, strategy, method)
    if isinstance(data, splitting.BatchesForKeras):
        return _Batches(data)
    if strategy is None or strategy.extended.cluster is None:
        return data
    return loader_with_rows(data)


def array_batch_counts(adapter: Any) -> list[Any] | None:
    """Return the numbers of batches, rows per batch and rows of a partial batch."""
    if not isinstance(adapter, keras_adapters.ArrayDataAdapter):
        return None
    return [adapter.num_batches, adapter.batch_size, adapter.partial_batch_size]


def read_local_rows(
    adapter: Any,
    local_bounds: LocalBoundsFn,
    batches_of: Callable[[Any], Iterable[Any]],
) -> Iterable[LocalRows] | None:
    """Return this worker's rows of a `fit`'s data; None if all rows must be read."""
    # `batches_of` returns the batches of an adapter as the backend reads them.
    if isinstance(adapter, keras_adapters.ArrayDataAdapter):
        inputs = adapter._inputs
        arrays = array_slicing.convert_to_sliceable(inputs, target_backend="numpy")
        if any(isinstance(leaf, _NOT_DENSE) for leaf in tree.flatten(arrays)):
            return None
        return RowsOfArrays(adapter, arrays, local_bounds, batches_of)
    shuffle = weigh = data = None
    if isinstance(adapter, keras_adapters.TorchDataLoaderAdapter):
        data = adapter.get_torch_dataloader()  # the user's loader on every backend
    elif isinstance(adapter, keras_adapters.PyDatasetAdapter):
        data, weigh = adapter.py_dataset, adapter._standardize_batch  # `class_weight`
        shuffle = functools.partial(_shuffle, adapter) if adapter.shuffle else None
    return find_source(data).row_reader(local_bounds, shuffle, weigh)


def _shuffle(adapter: Any, indices: list[int]) -> None:
    """Shuffle as Keras does a PyDataset's batches: by epoch since 3.16."""
    epoch = epoch_of(adapter)
    (random if epoch is None else random.Random(epoch)).shuffle(indices)


def read_ahead(
    iterator: Any, batches: Iterable[Any], scope: Scope = contextlib.nullcontext
) -> Iterable[Any]:
    """Return what a Keras loop reads, prefetched where this has no visible effect."""
    adapter = iterator.data_adapter
    depth = 0
    if isinstance(adapter, _Batches):
        depth = adapter.data.depth
    elif getattr(adapter, "enqueuer", None) is None:
        depth = find_source(getattr(adapter, "py_dataset", None)).start_prefetch(0)
    if depth == 0:
        return batches
    pauses = [n for n in (iterator.steps_per_epoch, adapter.num_batches) if n]
    return Prefetcher(iter(batches), depth, pauses, scope)


def has_local_batches(iterator: Any) -> bool:
    """Return True if a Keras loop reads local batches of this worker."""
    adapter = iterator.data_adapter
    return isinstance(adapter, _Batches) and adapter.data.per_worker


def join_batches(
    iterator: Any, batches: Any, cluster: Any, local: int, same_shapes: bool
) -> PerWorkerBatches:
    """Combine the local batches of all workers; see `PerWorkerBatches`."""
    pause, shortest = _steps_of_epoch(iterator), iterator.data_adapter.data.shortest
    return PerWorkerBatches(batches, cluster, local, pause, same_shapes, shortest)


def synchronize(
    iterator: Any, batches: Any, cluster: Any, elements: Any = None
) -> Iterable[Any]:
    """Read global batches, or `elements` made of them; see `SynchronizedBatches`."""
    elements = batches if elements is None else elements
    if isinstance(iterator.data_adapter, keras_adapters.ArrayDataAdapter):
        return elements  # the workers have compared their arrays
    steps = _steps_of_epoch(iterator)
    is_tf = isinstance(iterator.data_adapter, keras_adapters.TFDatasetAdapter)

    def pauses(num_read: int) -> bool:
        at_end = bool(steps) and num_read % steps == 0
        return at_end or not getattr(batches, "can_read_ahead", is_tf)

    return SynchronizedBatches(elements, cluster, pauses, not is_building(iterator))


def _steps_of_epoch(iterator: Any) -> int | None:
    """Return after how many batches prefetching pauses; None at the end of the data."""
    if is_building(iterator):
        return 1
    return iterator.steps_per_epoch or iterator.data_adapter.num_batches


_BUILDS = "_ks_builds"


@contextlib.contextmanager
def building(iterator: Any) -> Iterator[None]:
    """Context manager in which the first batch of Keras's iterator builds a model."""
    if iterator is None or is_building(iterator):
        yield
        return
    setattr(iterator, _BUILDS, True)
    try:
        yield
    finally:
        delattr(iterator, _BUILDS)


def is_building(iterator: Any) -> bool:
    """Return True if Keras's iterator reads a batch to build a model."""
    return hasattr(iterator, _BUILDS)


def take_class_weight(fit: Any, model: Any, args: list, kwargs: dict) -> None:
    """Apply `class_weight` to distributed data, which Keras leaves unchanged."""
    try:
        arguments = inspect.signature(fit).bind(model, *args, **kwargs).arguments
    except TypeError:
        return  # Keras reports the error
    x = arguments.get("x")
    if not isinstance(x, _Batches):
        return
    for name in ("y", "sample_weight"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"Argument `{name}` must be None for a distributed dataset, whose "
                f"batches contain it. Received: {name} of type "
                f"{type(arguments[name]).__name__}"
            )
    x.class_weight = arguments.get("class_weight")


@contextlib.contextmanager
def skip_batches(adapter: Any, count: int) -> Iterator[None]:
    """Context manager that skips batches: a PyDataset creates only one of them."""
    if (
        not isinstance(adapter, keras_adapters.PyDatasetAdapter)
        or adapter.enqueuer is not None  # Keras's threads prefetch
    ):
        yield
        return
    skipping = _SkippingDataset(adapter.py_dataset, count)
    with override(adapter, "py_dataset", skipping):
        yield


class _SkippingDataset:
    """A PyDataset that returns the same batch for each of the first `count` indices."""

    def __init__(self, dataset: Any, count: int):
        self.dataset, self._count = dataset, count
        self._batch: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        if self._count == 0:
            return self.dataset[index]
        self._count -= 1
        if self._batch is None:
            self._batch = self.dataset[index]
        return self._batch


class _Batches(keras_adapters.GeneratorDataAdapter):
    """Adapter that lets Keras's loop read a distributed dataset, in every epoch."""

    def __init__(self, data: splitting.BatchesForKeras):
        self.data = data
        self.class_weight: Any = None
        self._output_signature = None
        self._start, self._first = self._read, None
        self._opened: Any = None
        if data.per_worker and not data.once:
            return  # workers agree as they read; nothing is read twice
        batches = self._read()
        self._first = first = list(itertools.islice(batches, 2))
        if not first:
            raise ValueError(
                "A distributed dataset for `fit` must have at least one batch."
            )
        if data.once:
            # A loop reads once to build the model, then from the start.
            self._start = lambda: itertools.chain(first, batches)

    def generator(self):
        opened, self._opened = self._opened, None
        return map(self._weighted, opened or self._start())

    @property
    def num_batches(self):
        return self.data.number

    @property
    def _first_batches(self):
        """The batches from which TensorFlow derives a signature."""
        if self._first is None:
            batches = self._read()
            self._first = list(itertools.islice(batches, 2))
            self._opened = itertools.chain(self._first, batches)
        return list(map(self._weighted, self._first))

    def get_tf_dataset(self):
        dataset = self.data.tf_dataset
        if self.data.per_worker and dataset is not None:
            adapter = keras_adapters.TFDatasetAdapter(dataset, self.class_weight)
            return adapter.get_tf_dataset()
        return super().get_tf_dataset()

    def _read(self):
        for batch in self.data.start():
            batch = tree.map_structure(lambda leaf: as_array(leaf, "it"), batch)
            batch = copy_batch(batch) if self.data.depth else batch
            batch = tuple(batch) if isinstance(batch, list) else batch
            yield batch if isinstance(batch, tuple) else (batch,)

    def _weighted(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.class_weight is None:
            return batch
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if sample_weight is not None or y is None or tree.is_nested(y):
            raise ValueError(
                "`class_weight` requires batches of inputs and one array of targets, "
                f"without sample weights. Received: a batch of {len(batch)} elements."
            )
        return x, y, adapter_utils.class_weight_to_sample_weights(y, self.class_weight)
