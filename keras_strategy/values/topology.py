"""Where the replicas of a strategy are: workers times the devices of each."""

import functools
from dataclasses import dataclass
from typing import Protocol


class Members(Protocol):
    """What is to be known of the workers."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of workers."""
        ...


@dataclass(frozen=True)
class Topology:
    """The replicas of a strategy, which are numbered worker by worker.

    Attributes:
        devices: The devices of this worker, one replica each; every worker has as
            many.
        cluster: The workers, None for this process alone.
    """

    devices: tuple[str, ...]
    cluster: Members | None = None

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of replicas, over all workers."""
        return len(self.devices) * (1 if self.cluster is None else self.cluster.size)

    @functools.cached_property
    def local_replicas(self) -> range:
        """The numbers, among all replicas, of those of this worker."""
        local = len(self.devices)
        first = 0 if self.cluster is None else self.cluster.rank * local
        return range(first, first + local)

    @property
    def first(self) -> int:
        """The number, among all replicas, of this worker's first."""
        return self.local_replicas.start
