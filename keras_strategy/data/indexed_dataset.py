"""Global batches of indexable rows, of which each worker reads only its own.

`IndexedDataset` is the public dataset. A torch `DataLoader` of an indexable dataset is
read the same way, with any Keras backend; torch is not imported for it, since a program
that has a loader has imported it.
"""

import copy
import functools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.step_state import Bounds, LocalRows, map_rows, override
from keras_strategy.data.row_independence import StateWatch, is_declared_independent
from keras_strategy.data.sources import PyDatasetReader, as_array
from keras_strategy.data.worker_batches import FULL_READS, digest_of, warn_once
from keras_strategy.errors import logger
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
        yield from self.dataset.iterate_in_epoch_order(map(self.read, indices))

    def read(self, index: int) -> LocalRows:
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
        return _local_rows(batch, rows, bounds, has_all, dataset.source)


def _local_rows(
    batch: Any, rows: Any, bounds: Bounds, has_all: bool, source: Any
) -> LocalRows:
    """Return this worker's rows of a batch, of which it has read all or its own."""
    digest = ""
    if has_all:
        digest = "" if is_declared_independent(source) else digest_of(batch)
        first, end = rows_to_read(bounds)
        batch = map_rows(lambda leaf: leaf[first:end], batch)
    checksum = zlib.crc32(repr(list(rows)).encode())
    return LocalRows(batch, bounds, len(rows), checksum, digest=digest)


def local_rows_start(
    dataset: Any, local_bounds: LocalBoundsFn
) -> Callable[..., Iterator[LocalRows]] | None:
    """Return a function that starts reading local rows, None if all must be read."""
    if isinstance(dataset, IndexedDataset):
        if not has_independent_rows(dataset):
            return None
        return PyDatasetReader(dataset, IndexedRowReader(dataset, local_bounds).read)
    loader = loader_with_rows(dataset)
    if not is_loader_with_rows(loader):
        return None
    return functools.partial(iter, LoaderRowReader(loader, local_bounds))


def has_independent_rows(dataset: IndexedDataset) -> bool:
    """Return True unless the user's `read` may make rows depend on each other."""
    is_default = type(dataset).read is IndexedDataset.read
    return is_default or is_declared_independent(dataset)


# --- torch's DataLoader

# The rows of a global batch, the bounds of this worker's, and whether it reads all.
_Requested = tuple[list, Bounds, bool]
_DRAWN_LATER = (
    "A dataset drew random numbers for a row, and had drawn none for its first batch. "
    "Until now each worker has read only its own rows, so the numbers drawn differ "
    "from those on one device; from now on each worker reads all rows. Draw for row i "
    "from its own generator, such as `np.random.default_rng([seed, i])`."
)
_copies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def loader_with_rows(loader: Any) -> Any:
    """Return the copy of a `DataLoader` that can also read this worker's rows.

    Keras reads the copy too: a second loader would start processes of its own, and draw
    random numbers that one device does not draw. Any other data is returned as it is,
    and a loader that does not request rows by index, or whose rows may depend on each
    other.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if (
        torch_data is None
        or type(loader) is not torch_data.DataLoader
        or is_loader_with_rows(loader)
    ):
        return loader
    if loader in _copies:
        return _copies[loader]
    dataset, collate = loader.dataset, loader.collate_fn
    is_default = collate is torch_data.default_collate
    source = dataset
    while type(source) is torch_data.Subset:  # whose `__getitems__` calls the source's
        source = source.dataset
    if (
        loader.batch_sampler is None
        or isinstance(dataset, torch_data.IterableDataset)
        or isinstance(loader.sampler, torch_data.DistributedSampler)
        or not getattr(loader, "in_order", True)
        or getattr(loader, "_iterator", None) is not None  # its processes have started
        or not (is_default or is_declared_independent(collate))
        or (hasattr(source, "__getitems__") and not is_declared_independent(dataset))
    ):
        return loader
    found = _copies[loader] = copy.copy(loader)
    sampler = _RowSampler(loader)
    vars(found).update(
        batch_sampler=sampler,
        collate_fn=sampler.collate,
        worker_init_fn=sampler.init_process,
    )
    return found


def is_loader_with_rows(loader: Any) -> bool:
    return isinstance(getattr(loader, "batch_sampler", None), _RowSampler)


class LoaderRowReader:
    """Reader of this worker's rows of a loader with rows.

    All workers draw the row order as the loader does, and read the complete first
    batch. If that leaves the dataset unchanged, they then read only their own rows.
    """

    def __init__(self, loader: Any, local_bounds: LocalBoundsFn):
        self._loader, self._local_bounds = loader, local_bounds
        self.sampler = loader.batch_sampler

    def __iter__(self) -> Iterator[LocalRows]:
        # In this order: starting draws random numbers, and may read ahead.
        with override(self.sampler, "local_bounds", self._local_bounds):
            batches = iter(self._loader)
        return self._read(batches, self.sampler.requested)

    def _read(
        self, batches: Iterator[Any], requested: deque[_Requested]
    ) -> Iterator[LocalRows]:
        sampler, dataset = self.sampler, self._loader.dataset
        for data in batches:
            rows, bounds, has_all = requested.popleft()
            has_changed = bool(sampler.changed)
            if has_changed:
                warn_once(context.get_strategy().extended.cluster, FULL_READS)
                if not sampler.reads_all:
                    logger.warning(_DRAWN_LATER)
            sampler.reads_all = has_changed
            yield _local_rows(_arrays(data), rows, bounds, has_all, dataset)


class _RowSampler:
    """Batch sampler of a loader with rows: all of a batch, or those of this worker.

    Its `collate` watches the dataset, in this or a loader's process.
    """

    def __init__(self, loader: Any):
        self._batches, self._collate = loader.batch_sampler, loader.collate_fn
        self._dataset, self._init = loader.dataset, loader.worker_init_fn
        # True once reading has changed the dataset, in memory that processes share.
        self.changed = sys.modules["torch"].zeros(1, dtype=bool)
        self._has_processes = loader.num_workers > 0
        if self._has_processes:
            self.changed.share_memory_()
        self._watch: StateWatch | None = None
        # Set while a `LoaderRowReader` starts.
        self.local_bounds: LocalBoundsFn | None = None
        # True if this worker reads all rows of each batch.
        self.reads_all = True
        # The global batches whose rows have not arrived yet, in order.
        self.requested: deque[_Requested] = deque()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader's process needs."""
        return {**vars(self), "_batches": (), "local_bounds": None, "requested": None}

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        self.requested = deque()
        return self._sample(self.local_bounds, self.requested)

    def _sample(
        self, local_bounds: LocalBoundsFn | None, requested: deque[_Requested]
    ) -> Iterator[list]:
        for batch in self._batches:
            rows, first, end = list(batch), 0, None
            if local_bounds is not None:
                bounds = local_bounds(len(rows))
                requested.append((rows, bounds, self.reads_all))
                if not self.reads_all:
                    first, end = rows_to_read(bounds)
            if not self._has_processes:
                self._begin()
            yield rows[first:end]

    def init_process(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        self._begin()

    def _begin(self) -> None:
        if self._watch is None:
            self._watch = StateWatch(self._dataset)
        elif not self.changed:
            self._watch.begin()

    def collate(self, rows: Any) -> Any:
        batch = self._collate(rows)
        if self._watch is not None and not self.changed:
            self.changed |= self._watch.has_changed()
            if self._has_processes:
                self._begin()
        return batch


def _arrays(data: Any) -> Any:
    """Return a batch as arrays or tensors that Keras accepts."""
    data = tuple(data) if isinstance(data, list) else data

    def convert(leaf):
        return as_array(leaf, "the DataLoader") if hasattr(leaf, "shape") else leaf

    return tree.map_structure(convert, data)
