"""A replica that is a thread, without what depends on the backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategy.backends.threads.patches import MergedScope, ReplicaScope
from keras_strategy.backends.threads.pool import TurnScheduler
from keras_strategy.core import context
from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.per_replica_attributes import (
    ReplicaAttributes,
    set_on_all_replicas,
)
from keras_strategy.core.protocols import Replica
from keras_strategy.core.step_state import StepState
from keras_strategy.devices import ReplicaTopology
from keras_strategy.keras_patches.internals import no_stateless_scope
from keras_strategy.training import ownership
from keras_strategy.training.reduction import check_same_dtype
from keras_strategy.training.variable_sync import local_summands
from keras_strategy.values import regroup, select_replica


class ThreadReplica(Replica):
    scope: ReplicaScope

    def __init__(
        self,
        strategy: Any,
        index: int,
        topology: ReplicaTopology,
        workers: Any,
        turns: TurnScheduler,
        attributes: ReplicaAttributes,
    ):
        self.id = topology.local_replicas[index]
        self.index = index
        self.devices = (topology.devices[index],)
        self.topology, self.workers = topology, workers
        self.step = StepState()
        self.context = ReplicaContext(strategy, self)  # pyright: ignore
        self._strategy = strategy
        self._turns = turns
        self._attributes = attributes

    def here(self, tensor: Any) -> Any:
        """Return another replica's tensor on this one's device."""

    def sum_all(self, name: str, tensors: Sequence[Any]) -> Any:
        """Sum the local replicas' and the other workers' tensors, in one thread."""

    def exchange(
        self, name: str, value: Any, combine: Callable[[list[Any]], Any]
    ) -> Any:
        """End the turn and exchange values, see `TurnScheduler.exchange`."""
        self._attributes.swap_out()
        result = self._turns.exchange(self.index, name, value, combine)
        self._attributes.swap_in()
        return result

    def total(self, name: str, tensor: Any) -> Any:
        """Return the sum over the replicas, which must not be modified."""

        def combine(tensors):
            types = {(tuple(t.shape), t.dtype) for t in tensors}
            if len(types) > 1:
                check_same_dtype(tensors)
                shapes = [tuple(t.shape) for t in tensors]
                raise ValueError(
                    f"`{name}` needs values of the same shape on every replica. "
                    f"Received the shapes {shapes}, in the order of the replicas. "
                    "For rows that differ use `all_gather`, or reduce them first."
                )
            return self.sum_all(name, tensors)

        return self.here(self.exchange(name, tensor, combine))

    def gather(self, tensor: Any, axis: int) -> tuple[Any, list[int]]:
        """Return the joined tensors of all replicas, and their sizes along the axis."""

        def combine(tensors):
            check_same_dtype(tensors)
            try:
                joined = keras.ops.concatenate(list(map(self.here, tensors)), axis)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                shapes = [tuple(t.shape) for t in tensors]
                raise ValueError(
                    "`all_gather` needs values of rank 1 or more whose dimensions "
                    f"other than axis={axis} are equal. Received the shapes "
                    f"{shapes}, in the order of the replicas."
                ) from error
            sizes = [t.shape[axis] for t in tensors]
            if self.workers is None:
                return joined, sizes
            joined, _ = self.workers.gather("all_gather", joined, axis)
            local_sizes = keras.ops.convert_to_tensor(sizes, dtype="int32")
            sizes, _ = self.workers.gather("all_gather", local_sizes, 0)
            return joined, keras.ops.convert_to_numpy(sizes).tolist()

        return self.exchange("all_gather", tensor, combine)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        def combine(calls):
            scopes = [scope for scope, _ in calls]
            joined = regroup(
                [call for _, call in calls],
                keras.ops.is_tensor,
                always_distributed=True,
            )
            with (
                context.cross_replica_scope(self._strategy),
                self._strategy.extended.group.scope(),
                MergedScope(scopes, self._aggregate, self.topology),
            ):
                return merge_fn(self._strategy, *joined[0], **joined[1])

        replicas = len(self.topology.devices)
        merged = self.exchange("merge_call", (self.scope, (args, kwargs)), combine)
        return tree.map_structure(
            lambda x: self.here(x) if keras.ops.is_tensor(x) else x,
            select_replica(merged, self.index, replicas, "merge_call"),
        )

    def _aggregate(self, variable: Any, values: Sequence[Any]) -> Any:
        summands = local_summands(variable, values, self.topology)
        return self.sum_all(f"the value of '{variable.path}'", summands)

    def once(self, fn: Callable[[], Any]) -> Any:
        with (
            set_on_all_replicas(),
            context.cross_replica_scope(self._strategy),
            self._strategy.extended.group.scope(),
            no_stateless_scope(),
        ):
            result = fn()
            ownership.broadcast_pending_values()  # before the replicas continue
            return result

    def global_seed_generator(self, make: Callable[[], Any]) -> Any:
        """Return the generator of all replicas, created at its first use."""
        if self._turns.seed_generator is None:
            self._turns.seed_generator = self.once(make)
        return self._turns.seed_generator
