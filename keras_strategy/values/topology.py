"""Topology of the replicas of a strategy."""

import functools
from dataclasses import dataclass
from typing import Protocol


class Members(Protocol):
    """The rank of this worker and the number of workers."""

    @property
    def rank(self) -> int:
        """The index of this worker."""
        ...

    @property
    def size(self) -> int:
        """The number of workers."""
        ...


@dataclass(frozen=True)
class ReplicaTopology:
    """The replicas of a strategy, numbered worker by worker.

    Attributes:
        devices: This worker's devices, one replica each. Every worker has as many.
        cluster: The workers; None for a single process.
    """

    devices: tuple[str, ...]
    cluster: Members | None = None

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of replicas over all workers."""
        return len(self.devices) * (1 if self.cluster is None else self.cluster.size)

    @functools.cached_property
    def local_replicas(self) -> range:
        """The replica ids of this worker."""
        count = len(self.devices)
        first = 0 if self.cluster is None else self.cluster.rank * count
        return range(first, first + count)

    @property
    def first_local_replica(self) -> int:
        """The replica id of this worker's first replica."""
        return self.local_replicas.start
