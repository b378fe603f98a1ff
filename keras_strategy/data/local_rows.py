"""A worker's rows of the global batch that a step of `fit` or its like computes.

An element of a distributed dataset: what each replica of this worker gets of it.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras import tree

from keras_strategy.core.step_state import BatchRows
from keras_strategy.training.row_weights import split_rows

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


class ReplicaParts(list[Any]):
    """The parts of one element: what each local replica gets of it, in their order.

    Attributes:
        alike: Whether all replicas, those of other workers included, get arrays of the
            same shapes and dtypes; None if that is not known.
        rows: The rows of the element; None if its arrays differ in that.
    """

    alike: bool | None = None
    rows: BatchRows | None = None

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """The element, with what `place` makes of the parts of each array."""
        return tree.map_structure(lambda *leaves: place(leaves), *self)


class EvenParts:
    """A batch of which each replica, all of them here, gets as many rows.

    Args:
        batch: The batch.
        arrays: What it holds, as arrays or tensors.
        replicas: The number of replicas.
    """

    alike = True

    def __init__(self, batch: Any, arrays: list[Any], replicas: int):
        self._batch = batch
        self._arrays = arrays
        self._replicas = replicas
        self.rows = BatchRows()
        for array in arrays:
            if array is not None:
                self.rows.counts = (array.shape[0] // replicas,) * replicas
                break

    def __len__(self) -> int:
        return self._replicas

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """See `Parts.placed`."""
        replicas = self._replicas
        leaves = [
            None if array is None else place(EvenRows(array, replicas))
            for array in self._arrays
        ]
        return tree.pack_sequence_as(self._batch, leaves)


class EvenRows(Sequence[Any]):
    """An array as parts of equal rows, which are cut when somebody looks at them.

    Attributes:
        whole: The array.

    Args:
        whole: The array.
        parts: How many there are.
    """

    __slots__ = ("_parts", "array")

    def __init__(self, whole: Any, parts: int):
        self.array = whole
        self._parts = parts

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._parts:
            raise IndexError(index)
        rows = self.array.shape[0] // self._parts
        return self.array[index * rows : (index + 1) * rows]
