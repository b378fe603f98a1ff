"""Global batches of indexable rows, of which each worker reads only its own.

`IndexedDataset` is the public dataset. A torch `DataLoader` of an indexable dataset is
read the same way, with any Keras backend; torch is not imported for it, since a program
that has a loader has imported it.
"""

import functools
import random
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

from keras_strategy.core.step_state import Bounds, LocalRows
from keras_strategy.data.sources import PyDatasetReader, as_array
from keras_strategy.data.worker_batches import digest_of
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

    Override `read` to read the rows of a batch in another way.

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

    Attributes:
        compared: True once the workers have compared a row that all of them have read.

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
        self.compared = False
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
        rows = self.dataset.rows_of(index)
        bounds = self.local_bounds(len(rows))
        first, end = rows_to_read(bounds)
        digest, reread = "", None
        if not self.dataset.compared:
            # All workers read one common row, to detect sources that differ.
            reread = functools.partial(self._digest_rows, rows[:1])
            digest = reread()
            self.dataset.compared = True
        batch = self.dataset.read(rows[first:end])
        batch = batch if self.weigh is None else self.weigh(batch)
        checksum = row_order_checksum(rows)
        return LocalRows(
            batch, bounds, len(rows), checksum, digest=digest, reread_digest=reread
        )

    def _digest_rows(self, rows: Sequence[int]) -> str:
        return digest_of(self.dataset.read(rows))


def row_order_checksum(rows: Iterable[int]) -> int:
    return zlib.crc32(repr(list(rows)).encode())


def local_rows_start(
    dataset: Any, local_bounds: LocalBoundsFn
) -> Callable[..., Iterator[LocalRows]] | None:
    """Return a function that starts reading local rows, None if there is no index."""
    if isinstance(dataset, IndexedDataset):
        return PyDatasetReader(dataset, IndexedRowReader(dataset, local_bounds).read)
    reader = loader_row_reader(dataset, local_bounds)
    return None if reader is None else functools.partial(iter, reader)


# --- torch's DataLoader

# Arguments of a loader beside its dataset, its sampler and its functions.
_LOADER_SETTINGS = (
    *("num_workers", "pin_memory", "timeout", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)
# The rows of a global batch, the bounds of this worker's, and whether it reads all.
_Requested = tuple[list, Bounds, bool]
_DRAWN_LATER = (
    "A dataset drew random numbers from a process-wide generator for a row, and had "
    "drawn none for its first batch. Until now each worker has read only its own rows, "
    "so the numbers drawn differ from those on one device; from now on each worker "
    "reads all rows. Draw for row i from its own generator, such as "
    "`np.random.default_rng([seed, i])`."
)


def loader_row_reader(
    loader: Any, local_bounds: LocalBoundsFn
) -> "LoaderRowReader | None":
    """Return the row reader of a loader: one, so that its worker processes live on.

    None unless it is a `DataLoader` that requests the rows of each batch by index.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if (
        torch_data is None
        or type(loader) is not torch_data.DataLoader
        or loader.batch_sampler is None
        or isinstance(loader.dataset, torch_data.IterableDataset)
        or isinstance(loader.sampler, torch_data.DistributedSampler)
        or not getattr(loader, "in_order", True)
    ):
        return None
    if loader not in _readers:
        _readers[loader] = LoaderRowReader(loader, local_bounds)
    _readers[loader].indices.local_bounds = local_bounds
    return _readers[loader]


class LoaderRowReader:
    """Reader of this worker's rows of an indexed `DataLoader`.

    All workers draw the row order as the loader does. Random numbers that the dataset
    draws per row from a process-wide generator would differ if a worker skipped rows.
    So every worker reads the complete first batch, and all complete batches if that
    draws any.
    """

    def __init__(self, loader: Any, local_bounds: LocalBoundsFn):
        self.indices = _LocalBatchSampler(loader.batch_sampler, local_bounds)
        self._is_first = True
        settings = {
            name: getattr(loader, name)
            for name in _LOADER_SETTINGS
            if hasattr(loader, name)
        }
        if loader.num_workers:
            init = functools.partial(_init_worker, loader.worker_init_fn)
            settings["worker_init_fn"] = init
        self._loader = type(loader)(
            loader.dataset,
            batch_sampler=self.indices,
            collate_fn=functools.partial(_collate_and_check, loader.collate_fn),
            **settings,
        )

    def __iter__(self) -> Iterator[LocalRows]:
        # In this order: starting draws random numbers, and may read ahead.
        batches = iter(self._loader)
        return self._read(batches, self.indices.requested)

    def _read(
        self, batches: Iterator[Any], requested: deque[_Requested]
    ) -> Iterator[LocalRows]:
        for data, has_drawn in batches:
            rows, bounds, reads_all = requested.popleft()
            digest, reread = "", None
            if self._is_first:
                self.indices.reads_all = has_drawn
                digest = digest_of(_arrays(data))
                if not has_drawn:
                    reread = functools.partial(self._digest_rows, rows)
            elif has_drawn and not self.indices.reads_all:
                logger.warning(_DRAWN_LATER)
                self.indices.reads_all = True
            self._is_first = False
            first, end = rows_to_read(bounds) if reads_all else (0, None)
            yield LocalRows(
                _arrays(data, first, end),
                bounds,
                len(rows),
                row_order_checksum(rows),
                digest=digest,
                reread_digest=reread,
            )

    def _digest_rows(self, rows: list) -> str:
        loader = self._loader
        data, _ = loader.collate_fn([loader.dataset[row] for row in rows])
        return digest_of(_arrays(data))


_readers: weakref.WeakKeyDictionary[Any, LoaderRowReader] = weakref.WeakKeyDictionary()


class _LocalBatchSampler:
    """Batch sampler that yields the indices of the rows that this worker reads."""

    def __init__(self, batches: Any, local_bounds: LocalBoundsFn):
        self._batches = batches
        self.local_bounds = local_bounds
        # True if this worker reads all rows of each batch.
        self.reads_all = True
        # The global batches whose rows have not arrived yet, in order.
        self.requested: deque[_Requested] = deque()

    def __iter__(self) -> Iterator[list]:
        self.requested = deque()
        return self._sample(self.requested)

    def _sample(self, requested: deque[_Requested]) -> Iterator[list]:
        for batch in self._batches:
            rows = list(batch)
            bounds = self.local_bounds(len(rows))
            requested.append((rows, bounds, self.reads_all))
            first, end = (0, len(rows)) if self.reads_all else rows_to_read(bounds)
            _record_random_states()
            yield rows[first:end]


def _arrays(data: Any, first: int = 0, end: int | None = None) -> Any:
    """Return rows of a batch as arrays or tensors that Keras accepts."""
    data = tuple(data) if isinstance(data, list) else data

    def select(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        return as_array(leaf, "the DataLoader")[first:end]

    return tree.map_structure(select, data)


# --- detection of random draws while reading rows, in this or a loader's process


_recorded: Any = None


def _record_random_states() -> None:
    global _recorded
    numbers: Any = np.random.get_state(legacy=True)
    _, keys, position, *gauss = numbers
    state = sys.modules["torch"].get_rng_state().numpy().tobytes()
    _recorded = random.getstate(), keys.tobytes(), position, gauss, state


def _collate_and_check(collate: Callable[[Any], Any], rows: Any) -> tuple[Any, bool]:
    """Return a batch of rows, and True if reading them drew random numbers."""
    batch = collate(rows)
    before = _recorded
    _record_random_states()
    return batch, before != _recorded


def _init_worker(init: Callable[[int], Any] | None, worker_id: int) -> None:
    if init is not None:
        init(worker_id)
    _record_random_states()
