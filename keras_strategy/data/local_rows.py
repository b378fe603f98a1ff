"""The rows of a global batch that a worker and each of its replicas compute."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras import tree

from keras_strategy.core.step_state import BatchRows
from keras_strategy.training.row_weights import split_rows

# Begin and end of each local replica's rows in the global batch.
Bounds = list[tuple[int, int]]
# Returns the bounds for a global batch of so many rows.
LocalBoundsFn = Callable[[int], Bounds]


@dataclass(frozen=True, eq=False)
class LocalRows:
    """A worker's rows of a global batch, a leaf for `keras.tree`."""

    # One placeholder row where the worker has none.
    batch: Any
    bounds: Bounds
    global_rows: int
    # Of the row numbers of the global batch; None where workers cannot differ in them.
    order_checksum: int | None = None
    # By rank, where each worker reads its own data; None where all have the same.
    worker_rows: tuple[int, ...] | None = None
    # Of rows of the first batch that all workers have read and that should be the same.
    digest: str = ""
    # Reads these rows again; None where that would draw from a process-wide generator.
    reread_digest: Callable[[], str] | None = None


def rows_to_read(bounds: Bounds) -> tuple[int, int]:
    """Return begin and end of the rows to read: one placeholder if there are none."""
    first, end = bounds[0][0], bounds[-1][1]
    return (first, end) if end > first else (0, 1)


def row_order_checksum(rows: Iterable[int]) -> int:
    """Return a checksum of row numbers and their order."""
    return zlib.crc32(repr(list(rows)).encode())


def local_bounds_fn(strategy: Any) -> LocalBoundsFn:
    """Return the function that computes a worker's bounds in a global batch."""
    local = strategy.extended.topology.local_replicas

    def local_bounds(rows: int) -> Bounds:
        bounds = split_rows(rows, strategy.num_replicas_in_sync)
        return bounds[local.start : local.stop]

    return local_bounds


class ReplicaParts(list[Any]):
    """One element of a distributed dataset: a list of each local replica's part."""

    # True if all replicas of all workers get arrays of the same shapes and dtypes.
    alike: bool | None = None
    # None if the arrays of a part differ in their number of rows.
    rows: BatchRows | None = None

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the element, with each array's parts replaced by `place(parts)`."""
        return tree.map_structure(lambda *leaves: place(leaves), *self)


class EvenParts:
    """`ReplicaParts` of a batch that local replicas share equally, without slices."""

    alike = True

    def __init__(self, batch: Any, arrays: list[Any], rows: int, replicas: int):
        self._batch = batch
        self._arrays = arrays
        self._replicas = replicas
        self.rows = BatchRows()
        self.rows.counts = (rows // replicas,) * replicas

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the element, with each array replaced by `place(its parts)`."""
        leaves = [
            None if array is None else place(EvenRows(array, self._replicas))
            for array in self._arrays
        ]
        return tree.pack_sequence_as(self._batch, leaves)


class EvenRows(Sequence[Any]):
    """An array as a sequence of equal parts, sliced on access."""

    __slots__ = ("_parts", "array")

    def __init__(self, array: Any, parts: int):
        self.array = array
        self._parts = parts

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._parts:
            raise IndexError(index)
        rows = self.array.shape[0] // self._parts
        return self.array[index * rows : (index + 1) * rows]
