"""What the rooms below know of a strategy, which `strategies` defines."""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.values.distributed import ReduceOp
from keras_strategy.values.logical_devices import LogicalDevices
from keras_strategy.values.topology import Topology

if TYPE_CHECKING:
    from keras_strategy.core.protocol import ReplicaGroup
    from keras_strategy.options.run import RunOptions
    from keras_strategy.workers.cluster import Cluster


class Strategy(Protocol):
    """What the rooms below know of a strategy."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, over all workers."""
        ...

    @property
    def batch_statistics(self) -> str | None:
        """Of which rows its replicas compute the statistics of a batch."""
        ...

    @property
    def shard(self) -> str | None:
        """What is split over its replicas."""
        ...

    @property
    def logical_devices(self) -> LogicalDevices | None:
        """The devices of each replica, where a replica may have several."""
        ...

    @property
    def parameter_device(self) -> str | None:
        """The device that keeps all variables; None where each replica's does."""
        ...

    @property
    def extended(self) -> "StrategyExtended":
        """What it holds."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Puts it in charge."""
        ...

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        options: "RunOptions | None" = None,
    ) -> Any:
        """Calls `fn` on every replica."""
        ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Combines the replicas' values into one."""
        ...

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values."""
        ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value that are on this worker."""
        ...


class StrategyExtended(Protocol):
    """What the rooms below know of `strategy.extended`."""

    @property
    def group(self) -> "ReplicaGroup":
        """Its replicas."""
        ...

    @property
    def cluster(self) -> "Cluster | None":
        """The workers that train together; None for this process alone."""
        ...

    @property
    def own_sums(self) -> Any:
        """What adds up in the user's own way, see `rules/own_sums.py`, or None."""
        ...

    @property
    def variables(self) -> MutableMapping[int, Any]:
        """The variables that were made in its scope, by `id`."""
        ...

    @property
    def topology(self) -> Topology:
        """Where its replicas are."""
        ...

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this worker's replicas."""
        ...

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Changes a variable outside of the replicas."""
        ...
