"""Sources whose batches have indices: `PyDataset`, and `IndexedDataset`."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.step_state import LocalRows
from keras_strategy.data.row_independence import StateWatch, is_declared_independent
from keras_strategy.data.sources.iterable import Source
from keras_strategy.data.worker_batches import FULL_READS, make_local_rows, warn_once
from keras_strategy.training.row_weights import LocalBoundsFn, rows_to_read

# The dataset that this thread reads, and the epoch of its row order. Iterations may
# overlap: a thread may prefetch beyond the end of an epoch, and two loops may read a
# dataset at once. So each keeps the epoch that it began with.
_reading: ContextVar[tuple[Any, int]] = ContextVar("reading", default=(None, 0))
_END = object()


class IndexedDataset(keras.utils.PyDataset):
    """Dataset of batches whose rows are read from a source one by one.

    A `keras.utils.PyDataset` reads a batch with one call, so every worker reads all of
    its rows. An `IndexedDataset` knows the rows of a batch before it reads them. In
    `fit`, `evaluate` and `predict`, and where a strategy distributes it, each worker
    reads only its own rows, in the order of one device. Without a strategy it is an
    ordinary `PyDataset`.

    Override `read` to read the rows of a batch in another way. Then all workers read
    all rows, as they do if reading changes the source: see `row_independent`.

    Args:
        source: The rows: an object with `len(source)` and `source[i]`, such as grain's
            `MapDataset` or data sources, a Hugging Face dataset, or torch's map-style
            datasets. A row is an array, a number, or a structure of them, and is the
            same whenever it is read.
        batch_size: The number of rows of a global batch.
        shuffle: If True, each epoch has another order.
        seed: The seed of the orders.
        drop_remainder: If True, a smaller last batch is dropped.
        threads: How many threads read the rows of a batch; 0 reads them one by one.
        prefetch: How many batches a strategy prefetches in a thread; 0 for a source
            that only the program's own thread may read.

    Raises:
        TypeError: If the source cannot be indexed.
        ValueError: If a number is not positive.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    rows = [(np.ones(3, "float32"), np.float32(i)) for i in range(10)]
    dataset = ks.IndexedDataset(rows, batch_size=4, shuffle=True)
    x, y = dataset[0]
    assert len(dataset) == 3 and x.shape == (4, 3) and y.shape == (4,)
    ```
    """

    _epoch = 0

    def __init__(
        self,
        source: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        threads: int = 0,
        prefetch: int = 1,
    ):
        super().__init__()
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise TypeError(
                "Argument `source` must have `len(source)` and `source[i]`. Received: "
                f"source of type {type(source).__name__}"
            )
        if batch_size < 1 or threads < 0 or prefetch < 0:
            raise ValueError(
                "Argument `batch_size` must be 1 or more, `threads` and `prefetch` 0 "
                f"or more. Received: batch_size={batch_size}, threads={threads}, "
                f"prefetch={prefetch}"
            )
        self.source = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_remainder = drop_remainder
        self.threads = threads
        self.prefetch = prefetch
        # Whether workers read all rows; None until they have read a batch.
        self._reads_all: bool | None = None
        self._order: tuple[int, np.ndarray] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the thread pool, which a copy starts anew."""
        return {**self.__dict__, "_pool": None}

    def __len__(self) -> int:
        """Return the number of batches."""
        rows = len(self.source)
        if self.drop_remainder:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Read a batch."""
        return self.read(self.rows_of(index))

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that this thread reads, else the next one."""
        dataset, epoch = _reading.get()
        return epoch if dataset is self else self._epoch

    def iterate_in_epoch_order(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches that read this dataset, all in the order of one epoch.

        Args:
            batches: An iterable that reads rows of this dataset.
        """
        epoch = self._epoch
        iterator = iter(batches)
        while True:
            token = _reading.set((self, epoch))
            try:
                batch = next(iterator, _END)
            finally:
                _reading.reset(token)
            if batch is _END:
                return
            yield batch

    def on_epoch_end(self) -> None:
        """Begin the next epoch, in another order if the dataset shuffles."""
        self._epoch += 1

    def rows_of(self, index: int) -> Sequence[int]:
        """Return the indices of a batch's rows in this epoch.

        Args:
            index: The index of the batch.
        """
        begin = index * self.batch_size
        end = min(begin + self.batch_size, len(self.source))
        if not self.shuffle:
            return range(begin, end)
        epoch = self.epoch
        order = self._order
        if order is None or order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = order = epoch, generator.permutation(len(self.source))
        return order[1][begin:end].tolist()

    def read(self, rows: Sequence[int]) -> Any:
        """Return rows of the source as a batch.

        Args:
            rows: Their indices.
        """
        if self.threads:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads)
            elements = list(self._pool.map(self.source.__getitem__, rows))
        else:
            elements = [self.source[row] for row in rows]
        return tree.map_structure(lambda *leaves: np.stack(leaves), *elements)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of completed epochs, as a dict."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called.

        Args:
            state: What `state_dict` returned.
        """
        self._epoch = state["epoch"]


@dataclass(frozen=True, eq=False)
class IndexedRowReader:
    """Reader of this worker's rows of an `IndexedDataset`."""

    dataset: IndexedDataset
    local_bounds: LocalBoundsFn
    # Shuffles the batches' indices in place, as Keras's `fit` does.
    shuffle: Callable[[list[int]], None] | None = None
    # Adds sample weights to a batch.
    weigh: Callable[[Any], Any] | None = None

    def __iter__(self) -> Iterator[LocalRows]:
        # Like Keras, draw the order when the first batch is requested.
        indices = list(range(len(self.dataset)))
        if self.shuffle is not None:
            self.shuffle(indices)
        yield from self.dataset.iterate_in_epoch_order(map(self.__getitem__, indices))

    def __getitem__(self, index: int) -> LocalRows:
        dataset, rows = self.dataset, self.dataset.rows_of(index)
        bounds, has_all = self.local_bounds(len(rows)), dataset._reads_all is not False
        watch = StateWatch(dataset.source) if dataset._reads_all is None else None
        first, end = (0, None) if has_all else rows_to_read(bounds)
        batch = dataset.read(rows[first:end])
        if watch is not None:
            dataset._reads_all = watch.has_changed()
            if dataset._reads_all:
                warn_once(context.get_strategy().extended.cluster, FULL_READS)
        batch = batch if self.weigh is None else self.weigh(batch)
        return make_local_rows(batch, rows, bounds, has_all, dataset.source)


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, which can start at any batch."""

    has_indices = True

    def count(self) -> int | None:
        with contextlib.suppress(TypeError, NotImplementedError):
            return self.data.num_batches
        return None

    def batches(self, first: int = 0) -> Iterator[Any]:
        self.data.on_epoch_begin()
        number = self.count()
        indices = itertools.count(first) if number is None else range(first, number)
        yield from self.in_order(map(self._reader.__getitem__, indices))
        self.data.on_epoch_end()

    def _reread(self, passes: list[int | None]) -> Iterator[Any]:
        """Skip epochs without reading them: None for a complete one."""
        for batches in passes:
            self.data.on_epoch_begin()
            if batches is None:
                self.data.on_epoch_end()
        return self.batches(self.first_batch)


class IndexedSource(PyDatasetSource):
    """An `IndexedDataset`."""

    def in_order(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self.data.iterate_in_epoch_order(batches)

    def start_prefetch(self, depth: int) -> int:
        return self.data.prefetch  # its rows are the same whenever they are read

    def row_reader(self, local_bounds: LocalBoundsFn, *options: Any) -> Any:
        # The user's `read` may make rows depend on each other.
        is_default = type(self.data).read is IndexedDataset.read
        if not is_default and not is_declared_independent(self.data):
            return None
        return IndexedRowReader(self.data, local_bounds, *options)
