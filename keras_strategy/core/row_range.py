"""Which rows of the global batch are a replica's."""

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
