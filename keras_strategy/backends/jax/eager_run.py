"""Eager `run`: replicas take turns, without compilation.

One program cannot serve replicas whose batches have different shapes, such as a last
batch that the replicas do not divide. They run operation by operation in threads. This
is slower, but supports different shapes, Python decisions that depend on the replica or
a value, and collectives of different numbers of rows.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import patches_state as keras_state
from keras_strategy.backends.jax.collectives import sum_replicas
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.state import (
    array_with_value,
    forbid_donation,
    read_components,
    set_components,
)
from keras_strategy.backends.threads.patches import (
    ReplicaScope,
    Settings,
    applied_settings,
    copy_settings,
    keep_global_seed_generator,
)
from keras_strategy.backends.threads.pool import ReplicaThreads, TurnScheduler
from keras_strategy.backends.threads.replica import ThreadReplica
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import (
    GroupAttributes,
    ReplicaAttributes,
)
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import StepState, row_ranges
from keras_strategy.core.variable_components import unwrap_variables
from keras_strategy.keras_patches.variables_optimizers import adopt, stored_dtype
from keras_strategy.training.ownership import check_owner
from keras_strategy.training.random import BatchDimCache
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.training.row_weights import apply_row_weight
from keras_strategy.training.train_step import find_batch_rows, traced_run_state
from keras_strategy.training.variable_sync import average_statistics, is_sync_on_read
from keras_strategy.values import ReduceOp, is_numeric_array, regroup, select_replica


class ThreadScope(ReplicaScope):
    replica: "EagerReplica"

    def __init__(self, replica: "EagerReplica", initial_values: dict[int, tuple]):
        super().__init__(replica)
        self.written: dict[int, Any] = {}
        # The components of variables by their `id`, shared by all replicas.
        self._initial_values = initial_values

    def get_current_value(self, variable: Any) -> jax.Array:
        array_with_value(variable)
        staged = self.state_mapping.get(id(variable))
        if staged is not None:
            return staged
        components = self._initial_values.get(id(variable))
        if components is None:
            components = self.replica.read_components(variable)
            self._initial_values[id(variable)] = components
        return components[self.replica.index]

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


class EagerReplica(ThreadReplica):
    has_global_statistics_in_fit = True  # as in the global program

    def __init__(
        self,
        strategy: Strategy,
        index: int,
        distribution: ReplicaDistribution,
        turns: TurnScheduler,
        attributes: ReplicaAttributes,
        initial_values: dict[int, tuple],
    ):
        topology, workers = distribution.topology, distribution.workers
        super().__init__(strategy, index, topology, workers, turns, attributes)
        self.device = distribution.devices[index]
        self.scope: ThreadScope = ThreadScope(self, initial_values)
        self._distribution = distribution

    def read_components(self, variable: Any) -> tuple[jax.Array, ...]:
        """Return the local replicas' values of a variable at the start of the run."""
        if is_sync_on_read(variable):
            check_owner(self._strategy, variable)
        forbid_donation(variable)  # the function may return its shard
        return read_components(variable, self._distribution)

    def call(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, settings: Settings
    ) -> Any:
        """Call a function on this replica, with the Keras settings of its caller."""

        def place(leaf):
            if isinstance(leaf, jax.Array) or is_numeric_array(leaf):
                return self.here(jnp.asarray(leaf))
            return leaf

        replicas = len(self._distribution.devices)
        with (
            applied_settings(settings),
            jax.default_device(self.device),
            context.replica_scope(self.context),
            # The scope ends in the turn: layers then forget their losses.
            self._attributes.in_turn(),
            self.scope,
        ):
            selected = select_replica((args, kwargs), self.index, replicas)
            args, kwargs = tree.map_structure(place, selected)
            output = unwrap_variables(fn(*args, **kwargs))
            average_statistics(self)
            # Nothing is written before every replica has succeeded.
            self.exchange("the end of the function", None, lambda _: None)
            return output

    def here(self, tensor: Any) -> jax.Array:
        return jax.device_put(tensor, self.device)

    def sum_all(self, name: str, tensors: Sequence[Any]) -> jax.Array:
        return sum_replicas(name, self._distribution, [[x] for x in tensors])[0]

    def exchange(
        self, name: str, value: Any, combine: Callable[[list[Any]], Any]
    ) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"`{name}` was called inside a function that JAX transforms (a jit, "
                "a scan, a cond, or a gradient of something other than all_reduce and "
                "all_gather), while the replicas' batches have different shapes. "
                "Call it outside of that function, or give all replicas batches of "
                "the same shape."
            )
        return super().exchange(name, value, combine)

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> jax.Array:
        total = _call_with_gradient(
            lambda x: (self.total("all_reduce", x), None),
            lambda _, gradient: self._sum_gradients("all_reduce", gradient),
            cast_for_sum(value),
        )
        if reduce_op is ReduceOp.MEAN:
            return total / self.topology.num_replicas
        return total

    def _sum_gradients(self, of: str, gradient: Any) -> jax.Array:
        # In a training step the optimizer multiplies by the row weight w_r afterwards,
        # so the gradient is (sum over s of w_s * g_s) / w_r.
        weight = self.step.row_weight
        total = self.total(f"gradient of {of}", apply_row_weight(gradient, weight))
        return (
            total if weight is None else apply_row_weight(total, weight and 1 / weight)
        )

    def all_gather(self, value: Any, axis: int) -> jax.Array:
        def gather(x):
            result, sizes = self.gather(x, axis)
            return self.here(result), np.array(sizes)

        def backward(sizes, gradient):
            total = self._sum_gradients("all_gather", gradient)
            return jnp.split(total, np.cumsum(sizes)[:-1], axis=axis)[self.id]

        return _call_with_gradient(gather, backward, keras.ops.convert_to_tensor(value))

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        # Not differentiable, as in the compiled program.
        args, kwargs = tree.map_structure(
            lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x,
            (args, kwargs),
        )
        return super().merge_call(merge_fn, args, kwargs)

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        tensors = [
            apply_row_weight(keras.ops.convert_to_tensor(t), weight) for t in tensors
        ]

        def combine(replicas):
            shapes = [[tuple(t.shape) for t in replica] for replica in replicas]
            if any(shape != shapes[0] for shape in shapes):
                raise ValueError(
                    "`optimizer.apply` needs gradients of the same shapes on every "
                    f"replica. Received these shapes, by replica: {shapes}."
                )
            return sum_replicas(self.step.reduction, self._distribution, replicas)

        totals = self.exchange(self.step.reduction, tensors, combine)
        return [self.here(t) for t in totals]

    write: Any = staticmethod(keras_state.write)


def _call_with_gradient(
    forward: Callable[[Any], tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    value: jax.Array,
) -> Any:
    """Call `forward`, which also returns what `backward` needs for the gradient."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return forward(value)[0]

    @jax.custom_vjp
    def call(x):
        return forward(x)[0]

    call.defvjp(forward, lambda saved, gradient: (backward(saved, gradient),))
    return call(value)


class EagerRunner:
    def __init__(self, strategy: Strategy, distribution: ReplicaDistribution):
        self._strategy = strategy
        self._distribution = distribution
        devices = distribution.topology.devices
        self._threads = ReplicaThreads(devices)
        self._attributes = GroupAttributes(len(devices), keras.ops.is_tensor)
        self._lock = threading.Lock()

    def run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, draws: BatchDimCache
    ) -> Any:
        """Implement `ReplicaGroup.run`; `draws` are the function's random draws."""
        distribution = self._distribution
        with self._lock:  # one run at a time
            turns = TurnScheduler(len(distribution.devices))
            attributes = self._attributes.begin()
            values: dict[int, tuple] = {}
            replicas = [
                EagerReplica(self._strategy, i, distribution, turns, changes, values)
                for i, changes in enumerate(attributes)
            ]
            batch = find_batch_rows(args, kwargs)
            if batch is not None and batch.counts is not None:
                rows = row_ranges(batch.counts)[batch.first :]
                for i, replica in enumerate(replicas):
                    replica.step = traced_run_state(
                        fn, (args, kwargs), rows[i], i, draws
                    )
            settings = copy_settings()
            try:
                outputs = self._threads.call(
                    turns,
                    [
                        functools.partial(replica.call, fn, args, kwargs, settings)
                        for replica in replicas
                    ],
                )
            finally:
                for replica in replicas:  # free the state despite reference cycles
                    replica.step = StepState()
            self._commit([replica.scope for replica in replicas])
            self._attributes.commit(attributes)
            keep_global_seed_generator(turns.seed_generator)
        has_workers = distribution.workers is not None
        return regroup(outputs, keras.ops.is_tensor, always_distributed=has_workers)

    def _commit(self, scopes: Sequence[ThreadScope]) -> None:
        """Write the replicas' assignments after all of them have succeeded."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        adopt(
            self._strategy,
            [v for v in written.values() if not keras_state.is_global_seed(v)],
        )
        for variable in written.values():
            if keras_state.is_global_seed(variable):
                keras_state.release(variable, scopes[0].get_current_value(variable))
                continue
            dtype = stored_dtype(variable)
            values = [
                jnp.asarray(scope.get_current_value(variable), dtype)
                for scope in scopes
            ]
            set_components(variable, values, self._distribution)
