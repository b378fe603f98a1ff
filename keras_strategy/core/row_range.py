"""Rows of the global batch that belong to a replica."""

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows of the global batch that a replica works on.

    Attributes:
        begin: Index of the first row. A number or a scalar tensor, like the others.
        count: The number of rows; 1 for a stand-in row.
        total: Rows of the global batch.
    """

    begin: Any
    count: Any
    total: Any


class BatchRows:
    """Row counts of one element of a distributed dataset, attached to its values.

    One is made for every element; class attributes avoid a call of `__init__`.

    Attributes:
        counts: Rows of each replica on all workers; None if the values have them.
        first: Index of this worker's first replica.
    """

    counts: tuple[int, ...] | None = None
    first: int = 0


@functools.lru_cache(maxsize=128)
def row_ranges(counts: tuple[int, ...]) -> list[RowRange]:
    """Return the rows of each replica, from the number of rows of each."""
    return [
        RowRange(sum(counts[:replica]), count, sum(counts))
        for replica, count in enumerate(counts)
    ]
