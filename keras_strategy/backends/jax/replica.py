"""One replica as the body of a shard_map sees it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax import on_read
from keras_strategy.backends.jax.distribution import AXIS
from keras_strategy.backends.jax.splitting import Parts
from keras_strategy.core import context
from keras_strategy.core.own_attributes import set_for_all
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.aggregation import is_on_read, parts_outside
from keras_strategy.rules.reduction import addable
from keras_strategy.rules.row_weights import weighted
from keras_strategy.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
)

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


class JaxReplica:
    """See `keras_strategy.core.protocol.Replica`.

    One trace serves all replicas: `id` is a traced scalar, and `devices` are those of
    all of them.

    Args:
        strategy: The strategy.
        devices: Canonical names of its devices.
        parts: What is known of the variables' parts, where the replicas share what
            optimizers keep.

    Attributes:
        parts: The argument.
        trains: Whether gradients were summed in the trace.
    """

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        parts: Parts | None = None,
    ):
        self._strategy = strategy
        self.parts = parts
        self.devices = devices
        self.step = StepState()
        self.trains = False

    @property
    def id(self) -> Any:
        return jax.lax.axis_index(AXIS)

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        value = addable(value)
        if reduce_op is ReduceOp.SUM:
            return jax.lax.psum(value, AXIS)
        return jax.lax.pmean(value, AXIS)

    def all_gather(self, value: Any, axis: int) -> Any:
        value = keras.ops.convert_to_tensor(value)
        if not -value.ndim <= axis < value.ndim:
            raise ValueError(
                "all_gather joins tensors along one of their dimensions. Received: "
                f"axis={axis} and a tensor of shape {value.shape}."
            )
        axis %= value.ndim
        if value.size == 0:  # which XLA refuses to gather
            shape = list(value.shape)
            shape[axis] *= self._strategy.num_replicas_in_sync
            return jnp.zeros(shape, value.dtype)
        return jax.lax.all_gather(value, AXIS, axis=axis, tiled=True)

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        def merged(leaf):
            return TracedPerReplica(leaf) if keras.ops.is_tensor(leaf) else leaf

        args, kwargs = tree.map_structure(merged, (args, kwargs))
        replicas = self._strategy.num_replicas_in_sync
        with context.strategy_in_charge(self._strategy), TracedMergedScope(replicas):
            result = merge_fn(self._strategy, *args, **kwargs)
        return tree.map_structure(of_this_replica, result)

    def once(self, fn: Callable[[], Any]) -> Any:
        with set_for_all(), keras_state.outside_of_trace():
            return fn()

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        self.trains = True
        tensors = [weighted(t, weight) for t in tensors]
        if self.parts is not None:
            return self.parts.summed(tensors)
        return jax.lax.psum(tensors, AXIS)

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        return draw()

    def write(self, variable: Any, value: Any) -> None:
        keras_state.write(variable, value)


class TracedMergedScope(keras.StatelessScope):
    """The variables as a `merge_call` sees them in the program of all replicas.

    Args:
        replicas: The number of replicas, over all workers.
    """

    def __init__(self, replicas: int):
        super().__init__(initialize_variables=False)
        self._around = keras_state.stateless_scope()
        self._replicas = replicas

    def component(self, variable: Any) -> Any:
        """What the replica that is traced holds of a variable."""
        value = self._around.get_current_value(variable)
        return keras_state.array_of(variable) if value is None else value

    def write(self, variable: Any, value: Any) -> None:
        """Sets what the replica that is traced holds of a variable."""
        self._around.add_update((variable, value))

    def get_current_value(self, variable: Any) -> Any:
        component = self.component(variable)
        if is_on_read(variable) and variable.aggregation != "none":
            return on_read.aggregate(variable, component)
        return component

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        first, other = parts_outside(variable, value, self._replicas)
        if first is not other:
            other = jax.numpy.where(jax.lax.axis_index(AXIS) == 0, first, other)
        self.write(variable, other)


def component_of(variable: Any) -> Any:
    """What the replica that is traced holds of a variable."""
    scope = keras_state.stateless_scope()
    if isinstance(scope, TracedMergedScope):
        return scope.component(variable)
    return keras_state.traced_value(variable)


def write_component(variable: Any, value: Any) -> None:
    """Sets what the replica that is traced holds of a variable."""
    scope = keras_state.stateless_scope()
    if isinstance(scope, TracedMergedScope):
        scope.write(variable, value)
    else:
        keras_state.write(variable, value)


class Traced(DistributedValues):
    """A value of all replicas inside their program, where each sees its own part.

    Args:
        component: What the replica that is traced holds.
    """

    def __init__(self, component: Any):
        self.component = component

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(jax.lax.all_gather(self.component, AXIS, axis=0))


class TracedPerReplica(Traced, PerReplica):
    """One that may differ from replica to replica."""


class TracedMirrored(Traced, Mirrored):
    """One that is the same on every replica."""


def in_program() -> bool:
    """Whether this code is traced as part of the replicas' program."""
    # To ask for the replica's number and be refused takes JAX milliseconds.
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes


def of_this_replica(leaf: Any) -> Any:
    """What the replica that is traced holds of a value."""
    if isinstance(leaf, Traced):
        return leaf.component
    if isinstance(leaf, DistributedValues):
        stacked = jax.numpy.stack([jax.numpy.asarray(v) for v in leaf.values])
        # Of this worker's replicas, of which each worker has as many.
        return stacked[jax.lax.axis_index(AXIS) % len(stacked)]
    return leaf
