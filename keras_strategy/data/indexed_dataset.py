"""Own rows of what a torch `DataLoader` reads from a dataset that can be indexed.

It works with any Keras backend, and torch is not imported for it: who has a loader has
imported it.

Batches of a source that can be indexed, of which a worker reads its own rows.
"""

import functools
import logging
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.data.local_rows import (
    Bounds,
    LocalBoundsFn,
    LocalRows,
    row_order_checksum,
    rows_to_read,
)
from keras_strategy.data.sources import EpochOrderedDataset, IndexedStart, as_array
from keras_strategy.data.worker_batches import digest_of

logger = logging.getLogger("keras_strategy")
# What a loader is made of beside its dataset, its sampler and its functions.
_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def is_indexed(loader: Any) -> bool:
    """Whether something is a loader that asks a dataset for the rows of each batch.

    A loader is not if it has an `IterableDataset`, or no batches of its own
    (`batch_size=None`), or gives them as they are ready, or if its class is a user's.

    Args:
        loader: Anything.
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


def loader_row_reader(loader: Any, share: LocalBoundsFn) -> "LoaderRowReader":
    """The own rows of a loader, whose processes may go on from epoch to epoch.

    Args:
        loader: A loader that `is_indexed`.
        share: See `LoaderRowReader`.
    """
    if loader not in _made:
        _made[loader] = LoaderRowReader(loader, share)
    _made[loader].indices.share = share
    return _made[loader]


class LoaderRowReader:
    """The batches of a loader, of which this worker's rows are read alone.

    All workers draw the numbers that the loader draws, so that all know the order of
    all rows. Those that a dataset draws for each row, from a generator of the whole
    process, would be others where a worker leaves out rows. So every worker reads the
    first batch whole, and all of them if that draws any.

    Args:
        loader: A loader that `is_indexed`.
        share: Which rows are this worker's.
    """

    def __init__(self, loader: Any, share: LocalBoundsFn):
        functions: dict[str, Any] = {"collate_fn": _CollateAndTell(loader.collate_fn)}
        if loader.num_workers:
            functions["worker_init_fn"] = _StartAndNote(loader.worker_init_fn)
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        self.indices = _Indices(loader.batch_sampler, share)
        self._is_first = True
        self._loader = type(loader)(
            loader.dataset, batch_sampler=self.indices, **kept, **functions
        )

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[LocalRows]:
        """Starts to read."""
        # In this order: to start draws random numbers, and may read on.
        batches = iter(self._loader)
        return self._read(batches, self.indices.given)

    def _read(self, batches: Iterator[Any], given: deque) -> Iterator[LocalRows]:
        for data, drawn in batches:
            bounds, rows, order, whole, first = given.popleft()
            if drawn and not self._is_first and not self.indices.whole:
                logger.warning(_DRAWN_LATER)
            if self._is_first or drawn:
                self.indices.whole = drawn
            part = slice(*rows_to_read(bounds)) if whole else _ALL
            compared = {}
            if self._is_first:
                again = None if drawn else functools.partial(self._digest_of, first)
                compared = {"digest": digest_of(_arrays(data, _ALL)), "again": again}
            self._is_first = False
            yield LocalRows(_arrays(data, part), bounds, rows, order, **compared)

    def _digest_of(self, rows: list) -> str:
        loader = self._loader
        data, _ = loader.collate_fn([loader.dataset[row] for row in rows])
        return digest_of(_arrays(data, _ALL))


_made: weakref.WeakKeyDictionary[Any, LoaderRowReader] = weakref.WeakKeyDictionary()

_ALL = slice(None)
_DRAWN_LATER = (
    "A dataset drew random numbers from a generator of the whole process for a row, "
    "and had drawn none for its first batch. Until here each worker has read its own "
    "rows alone, so what was drawn is not what one device draws; from here on each "
    "worker reads all rows. Draw for row i from a generator of its own, such as "
    "`np.random.default_rng([seed, i])`."
)


class _Indices:
    """Gives the numbers of the rows of each batch that are to be read.

    Attributes:
        share: Which rows are this worker's.
        whole: Whether all are to be read.
        given: What was given and has not been read yet, in order: where this worker's
            rows are, how many the batch has, a checksum of which they are, and whether
            all are to be read, and if so their numbers.
    """

    def __init__(self, batches: Any, share: LocalBoundsFn):
        self._batches = batches
        self.share = share
        self.whole = True
        self.given: deque[tuple[Bounds, int, int, bool, list]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        self.given = deque()
        return self._give(self.given)

    def _give(self, given: deque) -> Iterator[list]:
        for batch in self._batches:
            batch = list(batch)
            rows = len(batch)
            bounds, order = self.share(rows), row_order_checksum(batch)
            numbers = batch if self.whole else []
            given.append((bounds, rows, order, self.whole, numbers))
            first, end = (0, rows) if self.whole else rows_to_read(bounds)
            _note_states()
            yield batch[first:end]


def _arrays(data: Any, rows: slice) -> Any:
    """Some rows of a batch, in arrays or tensors that Keras takes."""
    data = tuple(data) if isinstance(data, list) else data

    def part(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        return as_array(leaf, "the DataLoader")[rows]

    return tree.map_structure(part, data)


# --- whether reading rows draws random numbers, in this process or in a loader's

_noted: list[Any] = [None]


def _note_states() -> None:
    """Notes the states of the generators of this process before rows are read."""
    _noted[0] = _states()


def _states() -> tuple:
    numbers: Any = np.random.get_state(legacy=True)
    _, keys, position, *gauss = numbers
    state = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return random.getstate(), keys.tobytes(), position, gauss, state


class _CollateAndTell:
    """Makes a batch of rows, and tells whether the rows or that drew."""

    def __init__(self, collate: Callable[[Any], Any]):
        self._collate = collate

    def __call__(self, rows: Any) -> tuple[Any, bool]:
        batch = self._collate(rows)
        before, after = _noted[0], _states()
        _noted[0] = after
        return batch, before != after


class _StartAndNote:
    """Starts a process of a loader as the user wants it."""

    def __init__(self, start: Callable[[int], Any] | None):
        self._start = start

    def __call__(self, number: int) -> None:
        if self._start is not None:
            self._start(number)
        _note_states()


class IndexedDataset(EpochOrderedDataset):
    """Batches of the rows of a source, which are read one by one.

    A `keras.utils.PyDataset` reads a batch with one call, so every worker reads all of
    its rows. This one knows the rows of a batch before it reads them: in `fit` and its
    like, and where a strategy distributes it, each worker reads its own rows alone, in
    the order of one device. Without a strategy it is a `PyDataset` as any other.

    To read the rows of a batch in another way than one by one, override `read`.

    Args:
        source: The rows: what has `len(source)` and `source[i]`, such as a `MapDataset`
            or a data source of grain, a dataset of Hugging Face, or torch's datasets
            that can be indexed. A row is an array, a number, or a structure of them,
            and the same whenever it is read.
        batch_size: The rows of a batch of all replicas.
        shuffle: Whether each epoch has another order.
        seed: What the orders follow from.
        drop_remainder: Whether to leave out a last batch of fewer rows.
        threads: How many threads read the rows of a batch; 0 for one after the other.
        prefetch: How many batches a strategy reads in a thread before they are asked
            for; 0 for a source that only the thread of the program may read.

    Attributes:
        compared: Whether workers have compared a row, which all of them read for it.

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
        """A copy starts threads of its own."""
        return {**self.__dict__, "_pool": None}

    def __len__(self) -> int:
        """The number of batches."""
        rows = len(self.source)
        if self.drop_remainder:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        """Reads a batch."""
        return self.read(self.rows_of(index))

    def on_epoch_end(self) -> None:
        """Begins the next epoch, in another order if the dataset shuffles."""
        self._epoch += 1

    def rows_of(self, index: int) -> Sequence[int]:
        """Which rows of the source a batch of this epoch has.

        Args:
            index: The number of the batch.
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
        """Reads rows of the source, as a batch.

        Args:
            rows: Their numbers.
        """
        if self.threads:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads)
            read = list(self._pool.map(self.source.__getitem__, rows))
        else:
            read = [self.source[row] for row in rows]
        return tree.map_structure(lambda *parts: np.stack(parts), *read)

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset is: the epochs that it has given."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called."""
        self._epoch = state["epoch"]


class IndexedRowReader:
    """The batches of a dataset, of which this worker's rows are read alone.

    Args:
        dataset: The dataset.
        share: Which rows are this worker's.
        shuffle: Brings the batches' numbers into another order, as Keras's `fit` does;
            None if they come one after the other.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        share: LocalBoundsFn,
        shuffle: Callable[[list[int]], None] | None = None,
    ):
        self._dataset = dataset
        self._share = share
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[LocalRows]:
        """Starts to read."""
        # The order is drawn as Keras draws it, when the first batch is asked for.
        indices = list(range(len(self._dataset)))
        if self._shuffle is not None:
            self._shuffle(indices)
        yield from self._dataset.iterate_in_epoch_order(map(self.read, indices))

    def read(self, index: int) -> LocalRows:
        """Reads this worker's rows of a batch."""
        rows = self._dataset.rows_of(index)
        bounds = self._share(len(rows))
        first, end = rows_to_read(bounds)
        compared = {}
        if not self._dataset.compared:
            # A row that is another worker's, to know whether both have the same source.
            again = functools.partial(self._digest_of, rows[:1])
            compared = {"digest": again(), "again": again}
            self._dataset.compared = True
        batch = self._dataset.read(rows[first:end])
        return LocalRows(batch, bounds, len(rows), row_order_checksum(rows), **compared)

    def _digest_of(self, rows: Sequence[int]) -> str:
        return digest_of(self._dataset.read(rows))


def local_rows_start(
    dataset: Any, share: LocalBoundsFn
) -> Callable[..., Iterator[LocalRows]] | None:
    """What starts to read own rows for a loop of one's own, None if it is not indexed.

    Args:
        dataset: A dataset of global batches.
        share: Which rows are this worker's.
    """
    if is_indexed(dataset):
        return functools.partial(iter, loader_row_reader(dataset, share))
    if isinstance(dataset, IndexedDataset):
        return IndexedStart(dataset, IndexedRowReader(dataset, share).read)
    return None
