"""A worker's rows of the global batch that a step of `fit` or its like computes."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from keras_strategy.rules.row_weights import split_rows

Bounds = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class LocalRows:
    """A worker's rows of a global batch. To trees it is a leaf.

    Attributes:
        batch: The batch with this worker's rows in the place of each array. Where it
            has no rows, one that stands in for them.
        bounds: Where the rows of this worker's replicas begin and end in the global
            batch.
        total: The rows of the global batch.
        order: Tells which rows the global batch has, where the workers might not read
            the same; None where they cannot.
        counts: The rows of each worker, by rank, where they have read data of their
            own, which make up the global batch; None where all have the same data.
        digest: Of rows that all workers have read of the first batch, where they have
            the same data but might not; else empty.
        again: Reads those rows once more for their digest; None where that would draw
            random numbers of the process.
    """

    batch: Any
    bounds: Bounds
    global_rows: int
    order_checksum: int | None = None
    worker_rows: tuple[int, ...] | None = None
    digest: str = ""
    reread_digest: Callable[[], str] | None = None


# Where the rows of this worker's replicas begin and end, by the rows of a batch.
LocalBoundsFn = Callable[[int], Bounds]


def rows_to_read(bounds: Bounds) -> tuple[int, int]:
    """Which rows to read; where there are none, one that stands in for them."""
    first, end = bounds[0][0], bounds[-1][1]
    return (first, end) if end > first else (0, 1)


def row_order_checksum(rows: Iterable[int]) -> int:
    """What tells which rows a batch has: see `LocalRows.order`."""
    return zlib.crc32(repr(list(rows)).encode())


def local_bounds_fn(strategy: Any) -> LocalBoundsFn:
    """What a worker's replicas compute of each batch that all workers have."""
    local = strategy.extended.topology.local_replicas

    def share(rows: int) -> Bounds:
        bounds = split_rows(rows, strategy.num_replicas_in_sync)
        return bounds[local.start : local.stop]

    return share
