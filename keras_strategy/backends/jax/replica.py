"""Replicas: the one that a compiled program traces, and those that take turns.

One trace serves all replicas: it is the body of a shard_map. But one program cannot
serve replicas whose batches have different shapes, such as a last batch that the
replicas do not divide. They run operation by operation in threads. This is slower, but
supports different shapes, Python decisions that depend on the replica or a value, and
collectives of different numbers of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.collectives import sum_replicas
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution
from keras_strategy.backends.jax.state import (
    LocalShards,
    aggregate,
    array_with_value,
    read_components,
)
from keras_strategy.backends.jax.variables import forbid_donation
from keras_strategy.backends.threads.patches import (
    ReplicaScope,
    Settings,
    applied_settings,
)
from keras_strategy.backends.threads.pool import TurnScheduler
from keras_strategy.backends.threads.replica import ThreadReplica
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import (
    ReplicaAttributes,
    set_on_all_replicas,
)
from keras_strategy.core.protocols import Replica, Strategy
from keras_strategy.core.step_state import StepState
from keras_strategy.core.variable_components import unwrap_variables
from keras_strategy.keras_patches.internals import (
    current_stateless_scope,
    no_stateless_scope,
    stored_value,
)
from keras_strategy.training.ownership import check_owner
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.training.row_weights import apply_row_weight
from keras_strategy.training.variable_sync import (
    average_statistics,
    is_sync_on_read,
    split_assigned_value,
)
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    is_numeric_array,
    select_replica,
)


class JaxReplica(Replica):
    """Implementation of `core.protocols.Replica` for all replicas of a program."""

    def __init__(
        self, strategy: Strategy, devices: tuple[str, ...], shards: LocalShards | None
    ):
        self._strategy = strategy
        self.shards = shards  # if the strategy shards optimizer slots
        self.devices = devices  # of all replicas
        self.step = StepState()
        self.is_training = False  # the trace has summed gradients

    @property
    def id(self) -> Any:
        return jax.lax.axis_index(AXIS)

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        value, weight = cast_for_sum(value), self.step.row_weight
        if isinstance(weight, Tracer) and jnp.issubdtype(value.dtype, jnp.inexact):
            total = _sum_over_uneven_rows(value, weight)
        else:
            total = jax.lax.psum(value, AXIS)
        if reduce_op is ReduceOp.SUM:
            return total
        return total / self._strategy.num_replicas_in_sync

    def all_gather(self, value: Any, axis: int) -> Any:
        value = keras.ops.convert_to_tensor(value)
        if not -value.ndim <= axis < value.ndim:
            raise ValueError(
                "Argument `axis` of all_gather must be a dimension of the tensor. "
                f"Received: axis={axis} and a tensor of shape {value.shape}."
            )
        axis %= value.ndim
        if value.size == 0:  # XLA cannot gather empty arrays
            shape = list(value.shape)
            shape[axis] *= self._strategy.num_replicas_in_sync
            return jnp.zeros(shape, value.dtype)
        return jax.lax.all_gather(value, AXIS, axis=axis, tiled=True)

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        def wrap(leaf):
            return TracedPerReplica(leaf) if keras.ops.is_tensor(leaf) else leaf

        args, kwargs = tree.map_structure(wrap, (args, kwargs))
        replicas = self._strategy.num_replicas_in_sync
        with context.cross_replica_scope(self._strategy), TracedMergedScope(replicas):
            result = merge_fn(self._strategy, *args, **kwargs)
        return tree.map_structure(local_component, result)

    def once(self, fn: Callable[[], Any]) -> Any:
        with (
            set_on_all_replicas(),
            no_stateless_scope(),
            jax.ensure_compile_time_eval(),
        ):
            return fn()

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        self.is_training = True
        tensors = [apply_row_weight(t, weight) for t in tensors]
        if self.shards is not None:
            return self.shards.all_reduce(tensors)
        return jax.lax.psum(tensors, AXIS)

    write: Any = staticmethod(internals.write)


@jax.custom_vjp
def _sum_over_uneven_rows(value: Any, weight: Any) -> Any:
    return jax.lax.psum(value, AXIS)


@jax.custom_vjp
def _sum_gradients(gradient: Any, weight: Any) -> Any:
    # In a training step the optimizer multiplies by the row weight w_r afterwards, so
    # the gradient is (sum over s of w_s * g_s) / w_r. By the same rule each of the two
    # functions is the gradient of the other.
    total = jax.lax.psum(apply_row_weight(gradient, weight), AXIS)
    divisor = jnp.where(weight > 0, weight, 1).astype(total.dtype)
    return jnp.where(weight > 0, total / divisor, 0)


def _second_gradient(weight: Any, gradient: Any) -> Any:
    return _sum_over_uneven_rows(jnp.where(weight > 0, gradient, 0), weight), None


_sum_over_uneven_rows.defvjp(
    lambda value, weight: (_sum_over_uneven_rows(value, weight), weight),
    lambda weight, gradient: (_sum_gradients(gradient, weight), None),
)
_sum_gradients.defvjp(
    lambda gradient, weight: (_sum_gradients(gradient, weight), weight),
    _second_gradient,
)


class TracedMergedScope(keras.StatelessScope):
    """Scope of variables in a `merge_call` inside of the replicas' program."""

    def __init__(self, replicas: int):
        super().__init__(initialize_variables=False)
        self.replica_scope = current_stateless_scope()
        self._replicas = replicas

    def get_current_value(self, variable: Any) -> Any:
        value = _value_in(self.replica_scope, variable)
        if is_sync_on_read(variable) and variable.aggregation != "none":
            return aggregate(variable, value)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        first, other = split_assigned_value(variable, value, self._replicas)
        if first is not other:
            other = jnp.where(jax.lax.axis_index(AXIS) == 0, first, other)
        self.replica_scope.add_update((variable, other))


def _value_in(scope: Any, variable: Any) -> Any:
    value = None if scope is None else scope.get_current_value(variable)
    return stored_value(variable) if value is None else value


def component_of(variable: Any) -> Any:
    """Return the traced replica's value of a variable."""
    scope = current_stateless_scope()
    if isinstance(scope, TracedMergedScope):
        scope = scope.replica_scope
    return _value_in(scope, variable)


def write_component(variable: Any, value: Any) -> None:
    scope = current_stateless_scope()
    if isinstance(scope, TracedMergedScope):
        scope.replica_scope.add_update((variable, value))
    else:
        internals.write(variable, value)


class Traced(DistributedValues):
    """Distributed value inside of the replicas' program."""

    def __init__(self, component: Any):
        self.component = component

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(jax.lax.all_gather(self.component, AXIS, axis=0))


class TracedPerReplica(Traced, PerReplica):
    """Traced value that may differ between replicas."""


class TracedMirrored(Traced, Mirrored):
    """Traced value that is equal on all replicas."""


def local_component(leaf: Any) -> Any:
    """Return the traced replica's component of a value."""
    if isinstance(leaf, Traced):
        return leaf.component
    if isinstance(leaf, DistributedValues):
        stacked = jnp.stack(list(map(jnp.asarray, leaf.values)))
        # The components of this worker's replicas; every worker has as many.
        return stacked[jax.lax.axis_index(AXIS) % len(stacked)]
    return leaf


# --- replicas in turns


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

    write: Any = staticmethod(internals.write)


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
