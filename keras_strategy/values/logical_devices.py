"""Logical devices: the several devices of one replica."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number in ascending order."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


@dataclass(frozen=True)
class LogicalDevices:
    """The devices of each replica and the layouts of variables on them.

    Attributes:
        of_workers: Indexed by worker, replica and logical device: canonical names.
        rank: The rank of this worker.
        layouts: The `VariableLayouts` of its variables; None if every logical device holds
            every variable.
    """

    by_worker: tuple[tuple[tuple[str, ...], ...], ...]
    rank: int = 0
    layouts: Any = None

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """The logical devices of each replica of this worker."""
        return self.by_worker[self.rank]

    @property
    def per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return len(self.devices[0])


def partition_axes(parts: Sequence[int], logical: int) -> list[tuple[int, ...]] | None:
    """Return the mesh axes that split each dimension of a tensor.

    The mesh of the logical devices has one axis for each prime factor of their
    number, so every possible number of parts is a product of axis sizes.

    Args:
        parts: The number of parts of each dimension.
        logical: The number of logical devices.

    Returns:
        The indices of the axes of each dimension; None if the logical devices cannot
        be split like that.
    """
    if logical % math.prod(parts):
        return None
    unused = list(enumerate(prime_factors(logical)))
    axes = []
    for number in parts:
        dim_axes = []
        for factor in prime_factors(number):
            axis = next(axis for axis in unused if axis[1] == factor)
            unused.remove(axis)
            dim_axes.append(axis[0])
        axes.append(tuple(dim_axes))
    return axes
