"""Protocols of a strategy, for the layers below `strategies`."""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.values.distributed import ReduceOp
from keras_strategy.values.logical_devices import LogicalDevices
from keras_strategy.values.topology import ReplicaTopology

if TYPE_CHECKING:
    from keras_strategy.core.protocol import ReplicaGroup
    from keras_strategy.options.run import RunOptions
    from keras_strategy.workers.cluster import Cluster


class Strategy(Protocol):
    """The interface of a strategy; `strategies.base.Strategy` documents it."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def batch_statistics(self) -> str | None: ...

    @property
    def shard(self) -> str | None: ...

    @property
    def logical_devices(self) -> LogicalDevices | None: ...

    @property
    def parameter_device(self) -> str | None: ...

    @property
    def extended(self) -> "StrategyExtended": ...

    def scope(self) -> AbstractContextManager[Any]: ...

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        options: "RunOptions | None" = None,
    ) -> Any: ...

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: Any = None
    ) -> Any: ...

    def gather(self, value: Any, axis: int) -> Any: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...


class StrategyExtended(Protocol):
    """The interface of `strategy.extended`."""

    @property
    def group(self) -> "ReplicaGroup": ...

    @property
    def cluster(self) -> "Cluster | None":
        """The workers that train together; None for a single process."""
        ...

    @property
    def custom_reducer(self) -> Any:
        """Reduction by the user's `CrossDeviceOps`, or None."""
        ...

    @property
    def variables(self) -> MutableMapping[int, Any]:
        """Variables created in the scope, by `id`."""
        ...

    @property
    def topology(self) -> ReplicaTopology: ...

    @property
    def worker_devices(self) -> tuple[str, ...]: ...

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any: ...
