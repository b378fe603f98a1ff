"""A worker reads its own rows of the batches that Keras makes of arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from keras_strategy.rules.row_weights import split_rows


class OwnRows(tuple):
    """A worker's rows of a global batch; to Keras it is a batch.

    A worker without rows has one row, which stands in for them.

    Attributes:
        rows: The rows of the global batch.
        batch: This worker's, as it was read.
    """

    rows: int
    batch: Any


def bounds_of_replicas(rows: int, strategy: Any) -> list[tuple[int, int]]:
    """Where the rows of this worker's replicas begin and end in a global batch."""
    local = strategy.extended.topology.local_replicas
    return split_rows(rows, strategy.num_replicas_in_sync)[local.start : local.stop]


def reads_own_rows(loader: Any, strategy: Any) -> Any:
    """A loader of the same batches, of which it reads this worker's rows alone.

    It draws the random numbers that the loader would draw, so that all workers know
    the order of all rows.

    Args:
        loader: A `DataLoader` that Keras made of arrays.
        strategy: The strategy, of several workers.
    """
    sampler = _Sampler(
        loader.batch_sampler, lambda rows: bounds_of_replicas(rows, strategy)
    )
    return torch.utils.data.DataLoader(
        _Dataset(loader.dataset), batch_sampler=sampler, collate_fn=loader.collate_fn
    )


class _Indices(list):
    """The rows to read, and how many the global batch has."""

    rows: int


class _Sampler(torch.utils.data.Sampler):
    def __init__(
        self, batches: Any, bounds: Callable[[int], list[tuple[int, int]]]
    ) -> None:
        self._batches = batches
        self._bounds = bounds

    def __iter__(self) -> Iterator[_Indices]:
        for batch in self._batches:
            bounds = self._bounds(len(batch))
            own = _Indices(batch[bounds[0][0] : bounds[-1][1]] or batch[:1])
            own.rows = len(batch)
            yield own

    def __len__(self) -> int:
        return len(self._batches)


class _Dataset(torch.utils.data.Dataset):
    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __getitems__(self, indices: _Indices) -> OwnRows:
        batch = self._dataset.__getitems__(indices)
        own = OwnRows(batch if isinstance(batch, tuple) else (batch,))
        own.rows, own.batch = indices.rows, batch
        return own
