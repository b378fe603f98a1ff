"""Global batches of indexable rows, of which each worker reads only its own.

`IndexedDataset` is the public dataset. A torch `DataLoader` of an indexable dataset is
read the same way, with any Keras backend; torch is not imported for it, since a program
that has a loader has imported it.
"""

import functools
import logging
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from keras import tree

from keras_strategy.data.local_rows import (
    Bounds,
    LocalBoundsFn,
    LocalRows,
    row_order_checksum,
    rows_to_read,
)
from keras_strategy.data.sources import EpochOrderedDataset, PyDatasetReader, as_array
from keras_strategy.data.worker_batches import digest_of

logger = logging.getLogger("keras_strategy")


class IndexedDataset(EpochOrderedDataset):
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
        """Read rows of the source as a batch.

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
        """Continue where `state_dict` was called."""
        self._epoch = state["epoch"]


class IndexedRowReader:
    """Reader of this worker's rows of an `IndexedDataset`.

    Args:
        dataset: The dataset to read.
        local_bounds: Returns this worker's bounds in a global batch.
        shuffle: Shuffles the batches' indices in place, as Keras's `fit` does; None if
            they stay in order.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        local_bounds: LocalBoundsFn,
        shuffle: Callable[[list[int]], None] | None = None,
    ):
        self._dataset = dataset
        self._local_bounds = local_bounds
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[LocalRows]:
        # Like Keras, draw the order when the first batch is requested.
        indices = list(range(len(self._dataset)))
        if self._shuffle is not None:
            self._shuffle(indices)
        yield from self._dataset.iterate_in_epoch_order(map(self.read, indices))

    def read(self, index: int) -> LocalRows:
        """Read this worker's rows of a batch."""
        rows = self._dataset.rows_of(index)
        bounds = self._local_bounds(len(rows))
        first, end = rows_to_read(bounds)
        digest, reread = "", None
        if not self._dataset.compared:
            # All workers read one common row, to detect sources that differ.
            reread = functools.partial(self._digest_rows, rows[:1])
            digest = reread()
            self._dataset.compared = True
        batch = self._dataset.read(rows[first:end])
        return LocalRows(
            batch,
            bounds,
            len(rows),
            row_order_checksum(rows),
            digest=digest,
            reread_digest=reread,
        )

    def _digest_rows(self, rows: Sequence[int]) -> str:
        return digest_of(self._dataset.read(rows))


def local_rows_start(
    dataset: Any, local_bounds: LocalBoundsFn
) -> Callable[..., Iterator[LocalRows]] | None:
    """Return a function that starts reading local rows, None if `dataset` has no index.

    For distributed datasets: `fit` uses the readers themselves.
    """
    if is_indexed(dataset):
        return functools.partial(iter, loader_row_reader(dataset, local_bounds))
    if isinstance(dataset, IndexedDataset):
        reader = IndexedRowReader(dataset, local_bounds)
        return PyDatasetReader(dataset, reader.read)
    return None


# --- torch's DataLoader


# Arguments of a loader beside its dataset, its sampler and its functions.
_LOADER_SETTINGS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
_DRAWN_LATER = (
    "A dataset drew random numbers from a process-wide generator for a row, and had "
    "drawn none for its first batch. Until now each worker has read only its own rows, "
    "so the numbers drawn differ from those on one device; from now on each worker "
    "reads all rows. Draw for row i from its own generator, such as "
    "`np.random.default_rng([seed, i])`."
)
_ALL = slice(None)


def is_indexed(loader: Any) -> bool:
    """Return True for a `DataLoader` that requests the rows of each batch by index.

    False for one with an `IterableDataset`, without batching (`batch_size=None`), with
    batches in order of completion, or of the user's own class.
    """
    torch_data = sys.modules.get("torch.utils.data")
    return (
        torch_data is not None
        and type(loader) is torch_data.DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, torch_data.IterableDataset)
        and not isinstance(loader.sampler, torch_data.DistributedSampler)
        and getattr(loader, "in_order", True)
    )


def loader_row_reader(loader: Any, local_bounds: LocalBoundsFn) -> "LoaderRowReader":
    """Return the row reader of an indexed loader, one for all epochs.

    So its persistent worker processes live on.
    """
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
        functions: dict[str, Any] = {"collate_fn": _CollateAndCheck(loader.collate_fn)}
        if loader.num_workers:
            functions["worker_init_fn"] = _InitWorker(loader.worker_init_fn)
        settings = {
            name: getattr(loader, name)
            for name in _LOADER_SETTINGS
            if hasattr(loader, name)
        }
        self.indices = _LocalBatchSampler(loader.batch_sampler, local_bounds)
        self._is_first = True
        self._loader = type(loader)(
            loader.dataset, batch_sampler=self.indices, **settings, **functions
        )

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[LocalRows]:
        # In this order: starting draws random numbers, and may read ahead.
        batches = iter(self._loader)
        return self._read(batches, self.indices.requested)

    def _read(
        self, batches: Iterator[Any], requested: "deque[_Requested]"
    ) -> Iterator[LocalRows]:
        for data, has_drawn in batches:
            request = requested.popleft()
            if has_drawn and not self._is_first and not self.indices.reads_all:
                logger.warning(_DRAWN_LATER)
            if self._is_first or has_drawn:
                self.indices.reads_all = has_drawn
            digest, reread = "", None
            if self._is_first:
                digest = digest_of(_arrays(data, _ALL))
                if not has_drawn:
                    reread = functools.partial(self._digest_rows, request.rows)
            self._is_first = False
            bounds = request.bounds
            local = slice(*rows_to_read(bounds)) if request.reads_all else _ALL
            yield LocalRows(
                _arrays(data, local),
                bounds,
                request.global_rows,
                request.order_checksum,
                digest=digest,
                reread_digest=reread,
            )

    def _digest_rows(self, rows: list) -> str:
        loader = self._loader
        data, _ = loader.collate_fn([loader.dataset[row] for row in rows])
        return digest_of(_arrays(data, _ALL))


_readers: weakref.WeakKeyDictionary[Any, LoaderRowReader] = weakref.WeakKeyDictionary()


class _Requested(NamedTuple):
    """A batch whose rows were requested; `rows` only if all of them were."""

    bounds: Bounds
    global_rows: int
    order_checksum: int
    reads_all: bool
    rows: list


class _LocalBatchSampler:
    """Batch sampler that yields the indices of the rows that this worker reads.

    Attributes:
        local_bounds: Returns this worker's bounds in a global batch.
        reads_all: True if this worker reads all rows of each batch.
        requested: The batches whose rows have not arrived yet, in order.
    """

    def __init__(self, batches: Any, local_bounds: LocalBoundsFn):
        self._batches = batches
        self.local_bounds = local_bounds
        self.reads_all = True
        self.requested: deque[_Requested] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        self.requested = deque()
        return self._sample(self.requested)

    def _sample(self, requested: deque[_Requested]) -> Iterator[list]:
        for batch in self._batches:
            batch = list(batch)
            bounds, reads_all = self.local_bounds(len(batch)), self.reads_all
            checksum = row_order_checksum(batch)
            rows = batch if reads_all else []
            requested.append(_Requested(bounds, len(batch), checksum, reads_all, rows))
            first, end = (0, len(batch)) if reads_all else rows_to_read(bounds)
            _record_random_states()
            yield batch[first:end]


def _arrays(data: Any, rows: slice) -> Any:
    """Return rows of a batch as arrays or tensors that Keras accepts."""
    data = tuple(data) if isinstance(data, list) else data

    def select(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        return as_array(leaf, "the DataLoader")[rows]

    return tree.map_structure(select, data)


# --- detection of random draws while reading rows, in this or a loader's process


_recorded: list[Any] = [None]


def _record_random_states() -> None:
    """Record this process's generator states before rows are read."""
    _recorded[0] = _random_states()


def _random_states() -> tuple:
    numbers: Any = np.random.get_state(legacy=True)
    _, keys, position, *gauss = numbers
    state = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return random.getstate(), keys.tobytes(), position, gauss, state


class _CollateAndCheck:
    """Collate function that also returns whether reading the rows drew numbers."""

    def __init__(self, collate: Callable[[Any], Any]):
        self._collate = collate

    def __call__(self, rows: Any) -> tuple[Any, bool]:
        batch = self._collate(rows)
        before, after = _recorded[0], _random_states()
        _recorded[0] = after
        return batch, before != after


class _InitWorker:
    """`worker_init_fn` that calls the user's and records the random states."""

    def __init__(self, init: Callable[[int], Any] | None):
        self._init = init

    def __call__(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        _record_random_states()
