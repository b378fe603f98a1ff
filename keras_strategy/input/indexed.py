"""Batches of a source that can be indexed, of which a worker reads its own rows."""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.input.agreement import digest_of
from keras_strategy.input.loaders import is_indexed, loader_row_reader
from keras_strategy.input.own_rows import LocalRows, LocalBoundsFn, rows_to_read, row_order_checksum
from keras_strategy.input.passes import EpochOrderedDataset
from keras_strategy.input.sources import IndexedStart


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


def local_rows_start(dataset: Any, share: LocalBoundsFn) -> Callable[..., Iterator[LocalRows]] | None:
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
