"""This worker's rows of the arrays that a `fit` is given.

The batches of `fit` and its like, as Keras's loops read them.
"""

import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.data import indexed_dataset, splitting
from keras_strategy.data.indexed_dataset import IndexedDataset, IndexedRowReader
from keras_strategy.data.local_rows import LocalBoundsFn, LocalRows, rows_to_read
from keras_strategy.data.prefetch import PrefetchedBatches, Scope, copy_batch
from keras_strategy.data.sources import as_array, is_tf_dataset
from keras_strategy.data.splitting import prefetch_depth
from keras_strategy.data.worker_batches import PerWorkerBatches
from keras_strategy.keras_patches.patch import home_of, hook
from keras_strategy.values import map_leaves

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


PyDatasetAdapter: Any = home_of(
    "PyDatasetAdapter", "keras.src.trainers.data_adapters.py_dataset_adapter"
).PyDatasetAdapter
GeneratorDataAdapter: Any = home_of(
    "GeneratorDataAdapter",
    "keras.src.trainers.data_adapters.generator_data_adapter",
).GeneratorDataAdapter
TorchDataLoaderAdapter: Any = home_of(
    "TorchDataLoaderAdapter",
    "keras.src.trainers.data_adapters.torch_data_loader_adapter",
).TorchDataLoaderAdapter
TFDatasetAdapter: Any = home_of(
    "TFDatasetAdapter", "keras.src.trainers.data_adapters.tf_dataset_adapter"
).TFDatasetAdapter
class_weight_to_sample_weights: Any = home_of(
    "class_weight_to_sample_weights",
    "keras.src.trainers.data_adapters.data_adapter_utils",
).class_weight_to_sample_weights


@hook(PyDatasetAdapter, "_get_iterator", "(self)")
def _get_iterator(original, self):
    """A pass over an `IndexedDataset` has one order, whoever reads ahead.

    Keras tells a dataset that an epoch ends while TensorFlow may read on in a thread.
    """
    dataset = self.py_dataset
    if isinstance(dataset, _LeftOut):
        dataset = dataset.dataset
    if not isinstance(dataset, IndexedDataset):
        return original(self)
    return dataset.iterate_in_epoch_order(original(self))


def for_keras(argument: Any, strategy: Any, method: str) -> Any:
    """An argument of `fit` or its like, as something that Keras can read.

    Args:
        argument: The argument.
        strategy: The strategy of the model, or None.
        method: The method's name.
    """
    data = splitting.keras_dataset(argument, strategy, method)
    if isinstance(data, splitting.BatchesForKeras):
        return _Batches(data)
    return data


def counts_of_arrays(adapter: Any) -> list[Any] | None:
    """What is known of a `fit`'s batches before it reads them, if they are arrays.

    Args:
        adapter: Keras's adapter of the data.

    Returns:
        How many batches there are, their rows, and those of a last partial one.
    """
    if not isinstance(adapter, ArrayDataAdapter):
        return None
    return [adapter.num_batches, adapter.batch_size, adapter.partial_batch_size]


def own_rows(
    adapter: Any, share: LocalBoundsFn, batches_of: Callable[[Any], Iterable[Any]]
) -> Iterable[LocalRows] | None:
    """This worker's rows of what a `fit` reads, without reading those of the others.

    Args:
        adapter: Keras's adapter of the data.
        share: Which rows are this worker's.
        batches_of: Gives the batches of an adapter as the engine reads them.

    Returns:
        None where nobody can tell one row from the others before they are read.
    """
    if isinstance(adapter, ArrayDataAdapter):
        return rows_of_arrays(adapter, share, batches_of)
    if isinstance(adapter, TorchDataLoaderAdapter):
        loader = adapter.get_torch_dataloader()  # the user's, on every backend
        if indexed_dataset.is_indexed(loader):
            return indexed_dataset.loader_row_reader(loader, share)
    dataset = getattr(adapter, "py_dataset", None)
    if isinstance(dataset, IndexedDataset):
        shuffle = functools.partial(_shuffle, adapter) if adapter.shuffle else None
        return _WithWeights(adapter, IndexedRowReader(dataset, share, shuffle))
    return None


def _shuffle(adapter: Any, numbers: list[int]) -> None:
    """As Keras shuffles a PyDataset's batches, by epochs since 3.16."""
    epoch = epoch_of(adapter)
    (random if epoch is None else random.Random(epoch)).shuffle(numbers)


def read_ahead(
    iterator: Any, batches: Iterable[Any], scope: Scope = contextlib.nullcontext
) -> Iterable[Any]:
    """What a loop of Keras's reads, some of it before it is asked for.

    Args:
        iterator: Keras's iterator.
        batches: The batches, or what is made of each.
        scope: What they are read in.

    Returns:
        `batches` themselves where that could be seen: see `prefetching.prefetch_depth`.
    """
    adapter = iterator.data_adapter
    dataset = getattr(adapter, "py_dataset", None)
    depth = 0
    if isinstance(adapter, _Batches):
        depth = adapter.data.depth
    elif isinstance(dataset, IndexedDataset) and adapter.enqueuer is None:
        depth = prefetch_depth(dataset, None)
    if depth == 0:
        return batches
    numbers = iterator.steps_per_epoch, adapter.num_batches
    return PrefetchedBatches(
        batches, depth, [number for number in numbers if number], scope
    )


def engine_orders(adapter: Any) -> bool:
    """Whether the engine shuffles the rows, so that another one has another order.

    Args:
        adapter: Keras's adapter of the data.
    """
    return isinstance(adapter, ArrayDataAdapter) and bool(adapter._shuffle)


def is_own(iterator: Any) -> bool:
    """Whether what a loop of Keras's reads are batches of this worker's own."""
    adapter = iterator.data_adapter
    return isinstance(adapter, _Batches) and adapter.data.own


def joined(
    iterator: Any, batches: Any, cluster: Any, local: int, same_shapes: bool
) -> PerWorkerBatches:
    """The batches that those of all workers make together, where `is_own`.

    Args:
        iterator: Keras's iterator.
        batches: What it gives on this worker.
        cluster: See `PerWorkerBatches`.
        local: See `PerWorkerBatches`.
        same_shapes: See `PerWorkerBatches`.
    """
    pause, shortest = steps_of_epoch(iterator), iterator.data_adapter.data.shortest
    return PerWorkerBatches(batches, cluster, local, pause, same_shapes, shortest)


def steps_of_epoch(iterator: Any) -> int | None:
    """After how many batches no other is read ahead, None if at the data's end alone.

    Args:
        iterator: Keras's iterator: after those of an epoch, or the one that builds.
    """
    if builds(iterator):
        return 1
    return iterator.steps_per_epoch or iterator.data_adapter.num_batches


def pauses_after(iterator: Any, batches: Any) -> Callable[[int], bool]:
    """Whether after so many batches no other is read before it is asked for.

    That could be seen by Python code that reads, of which nothing is known.

    Args:
        iterator: Keras's iterator.
        batches: What workers read who agree on each.
    """
    steps = steps_of_epoch(iterator)
    ahead = isinstance(batches, PrefetchedBatches)
    ahead = ahead or isinstance(iterator.data_adapter, TFDatasetAdapter)

    def pauses(taken: int) -> bool:
        if steps and taken % steps == 0:
            return True
        if isinstance(batches, indexed_dataset.LoaderRowReader):
            return batches.indices.whole  # its rows draw numbers
        return not ahead

    return pauses


_BUILDS = "_ks_builds"


@contextlib.contextmanager
def building(iterator: Any) -> Iterator[None]:
    """Surrounds what builds a model with the first batch of Keras's iterator."""
    if iterator is None or builds(iterator):
        yield
        return
    setattr(iterator, _BUILDS, True)
    try:
        yield
    finally:
        delattr(iterator, _BUILDS)


def builds(iterator: Any) -> bool:
    """Whether Keras's iterator gives a batch to build a model with."""
    return hasattr(iterator, _BUILDS)


def take_class_weight(fit: Any, model: Any, args: list, kwargs: dict) -> None:
    """Has distributed data bring the sample weights that `class_weight` makes.

    Keras hands out data of a kind that it does not know as it is.

    Args:
        fit: `Model.fit`.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments; changed in place.

    Raises:
        ValueError: If `y` or `sample_weight` is given beside distributed data.
    """
    try:
        given = inspect.signature(fit).bind(model, *args, **kwargs).arguments
    except TypeError:
        return  # Keras says what is wrong
    x = given.get("x")
    if not isinstance(x, _Batches):
        return
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise ValueError(
                f"Argument `{name}` cannot be given beside a distributed dataset, "
                f"whose batches hold it. Received: {name} of type "
                f"{type(given[name]).__name__}"
            )
    x.class_weight = given.get("class_weight")


@contextlib.contextmanager
def leaving_out(adapter: Any, count: int) -> Iterator[None]:
    """Surrounds what reads batches that nobody needs: a PyDataset makes one of them.

    Its batches are known by their numbers, in the order that Keras shuffles them in.
    What threads of Keras's read ahead of it is not.

    Args:
        adapter: Keras's adapter of the data.
        count: How many batches are read.
    """
    if not isinstance(adapter, PyDatasetAdapter) or adapter.enqueuer is not None:
        yield
        return
    dataset = adapter.py_dataset
    adapter.py_dataset = _LeftOut(dataset, count)
    try:
        yield
    finally:
        adapter.py_dataset = dataset


class _LeftOut:
    """A PyDataset that gives the first batch it makes in the place of some."""

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


class _WithWeights:
    """Own rows, with the sample weights that Keras makes of `class_weight`."""

    def __init__(self, adapter: Any, rows: Iterable[LocalRows]):
        self._adapter = adapter
        self._rows = rows

    def __iter__(self) -> Iterator[LocalRows]:
        return map(self._weighted, iter(self._rows))

    def _weighted(self, own: LocalRows) -> LocalRows:
        return replace(own, batch=self._adapter._standardize_batch(own.batch))


class _Batches(GeneratorDataAdapter):
    """Lets Keras's loop read the batches of a distributed dataset.

    Args:
        data: The batches; every epoch starts to read them anew.

    Attributes:
        data: The batches.
        class_weight: See `Model.fit`.
    """

    def __init__(self, data: splitting.BatchesForKeras):
        self.data = data
        self.class_weight: Any = None
        self._output_signature = None
        self._start, self._first = self._read, None
        self._opened: Any = None
        if data.own and not data.once:
            return  # the workers tell each other when they read; nothing is read twice
        batches = self._read()
        self._first = first = list(itertools.islice(batches, 2))
        if not first:
            raise ValueError("A distributed dataset for `fit` must have a batch.")
        if data.once:
            # A loop begins to read when it builds the model, and then anew.
            self._start = lambda: itertools.chain(first, batches)

    def generator(self):
        """Starts to read."""
        opened, self._opened = self._opened, None
        return map(self._weighted, opened or self._start())

    @property
    def num_batches(self):
        return self.data.number

    @property
    def _first_batches(self):
        """Of what TensorFlow learns what a batch is made of."""
        if self._first is None:
            batches = self._read()
            self._first = list(itertools.islice(batches, 2))
            self._opened = itertools.chain(self._first, batches)
        return list(map(self._weighted, self._first))

    def get_tf_dataset(self):
        if self.data.own and is_tf_dataset(self.data.dataset):
            adapter = TFDatasetAdapter(self.data.dataset, self.class_weight)
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
                "`class_weight` is for batches of inputs and one array of targets, "
                f"without sample weights. Received a batch of {len(batch)} parts."
            )
        return x, y, class_weight_to_sample_weights(y, self.class_weight)
