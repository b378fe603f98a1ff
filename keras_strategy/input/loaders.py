"""Own rows of what a torch `DataLoader` reads from a dataset that can be indexed.

It works with any Keras backend, and torch is not imported for it: who has a loader has
imported it.
"""

import functools
import logging
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.input.agreement import digest_of
from keras_strategy.input.own_rows import (
    Bounds,
    LocalRows,
    LocalBoundsFn,
    rows_to_read,
    row_order_checksum,
)
from keras_strategy.input.sources import as_array

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
