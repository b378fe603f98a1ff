"""Which rows of the global batch are a replica's."""

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows that a replica works on, of those of the global batch.

    Attributes:
        begin: The number of the first, from 0. A number or a scalar tensor, as the
            others.
        count: How many they are; 1 for a row that stands in.
        total: How many rows the global batch has.
    """

    begin: Any
    count: Any
    total: Any


class BatchRows:
    """The rows of one element of a distributed dataset, which its values carry.

    It is made for every element, and without a call of Python's.

    Attributes:
        counts: How many each replica has, those of other workers included; None where
            the values tell.
        first: The number of this worker's first replica.
    """

    counts: tuple[int, ...] | None = None
    first: int = 0


@functools.lru_cache(maxsize=128)
def ranges(counts: tuple[int, ...]) -> list[RowRange]:
    """Which rows are each replica's, given how many each of them has."""
    return [
        RowRange(sum(counts[:replica]), count, sum(counts))
        for replica, count in enumerate(counts)
    ]
