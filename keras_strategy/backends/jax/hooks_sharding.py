"""Patches of Keras for sharded variables on JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from keras_strategy.backends.jax.distribution import AXIS
from keras_strategy.backends.jax.hooks_state import array_of, stateless_scope, write
from keras_strategy.backends.jax.replica import JaxReplica, TracedMergedScope
from keras_strategy.backends.jax.splitting import LocalShards, gather_variable
from keras_strategy.backends.threads.hooks_shares import ShardedUpdateScope
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import hook, of_several
from keras_strategy.rules.held_values import overridden_value
from keras_strategy.rules.optimizer_rules import is_elementwise
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.rules.sharding import (
    dimension_to_shard,
    creating_slots,
    mark_as_slot,
)


@of_several
def _slot_sharding_distribution() -> Any:
    """Return the current distribution if it shards optimizer slots."""
    distribution = keras.distribution.distribution()
    return None if getattr(distribution, "shard", None) is None else distribution


@of_several
def _variable_sharding_distribution(variable: Any) -> Any:
    """Return the distribution of a variable that several workers shard."""
    array = array_of(variable)
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return None
    if array.is_fully_addressable or array.is_fully_replicated:
        return None
    return strategy_of_variable(variable).extended.group.distribution


@hook(
    keras.optimizers.Optimizer,
    "add_variable",
    ("shape",),
    when=_slot_sharding_distribution,
)
def _add_variable(original, distribution, self, *args, **kwargs):
    """Shard optimizer slots when they are created.

    No device ever holds a whole slot. Keras would give it the layout of its weight.
    """
    with creating_slots(kwargs.pop("layout", None)):
        variable = original(self, *args, **kwargs)
    mark_as_slot(variable)
    return variable


@hook(
    keras.Variable,
    "__array__",
    "(self, dtype=None)",
    when=_variable_sharding_distribution,
)
def _array(original, distribution, self, dtype=None, copy=None):
    """Gather a variable that several workers shard, when it is saved or read.

    A collective, unless each worker holds all shards.
    """
    override = overridden_value(self)
    if override is not None:
        return np.array(override, dtype)
    array = gather_variable(self, distribution)
    first = distribution.devices[0]
    local = next(s.data for s in array.addressable_shards if s.device == first)
    return np.array(local, dtype)  # always a copy


class _ShardsScope(ShardedUpdateScope):
    """Scope in which an optimizer updates one replica's shards.

    Args:
        shards: The local shards of the trace.
        dims: The sharded dimension of each variable, keyed by `id`.
        variables: The sharded variables.
        gradient_dims: The sharded dimension of each gradient; None if not sharded.
    """

    def __init__(
        self,
        shards: LocalShards,
        dims: dict[int, int],
        variables: Sequence[Any],
        gradient_dims: Sequence[int | None],
    ):
        parent = stateless_scope()
        values = {
            id(v): shards.shard(parent.get_current_value(v), dims[id(v)])
            for v in variables
        }
        super().__init__(parent, values, variables)
        self.written: dict[int, Any] = {}
        self._gradient_dims = gradient_dims

    def write(self, variable: Any, value: Any) -> None:
        self.shares[id(variable)] = value
        self.written[id(variable)] = variable

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        is_first = jax.lax.axis_index(AXIS) == 0
        pairs = zip(squares, self._gradient_dims, strict=True)
        # Count gradients that are not sharded once.
        local = [x if d is not None else jnp.where(is_first, x, 0) for x, d in pairs]
        totals = jax.lax.psum(jnp.stack(local), AXIS)
        return list(totals), jnp.sum(totals)


@of_several
def _updated_shards(optimizer: Any) -> LocalShards | None:
    """Return the local shards if each replica updates its shard of the weights."""
    replica = distributed_replica()
    if not isinstance(replica, JaxReplica) or not is_elementwise(optimizer):
        return None
    scope = stateless_scope()
    return None if isinstance(scope, TracedMergedScope) else replica.shards


@hook(
    keras.optimizers.Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=_updated_shards,
)
def _apply_gradients(original, shards, self, grads, trainable_variables):
    """Update only this replica's shard of the weights in `run`, with Keras's code.

    This needs only the local shards of the summed gradients and of the optimizer slots.
    Optimizers that are not elementwise update whole variables.
    """
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    dims, variables = {}, []
    for variable in (*weights, *self.variables):
        dim = dimension_to_shard(variable.shape, shards.replicas)
        if dim is not None:
            dims[id(variable)] = dim
            variables.append(variable)
    gradient_dims = [dims.get(id(v)) for v in trainable_variables]
    grads = list(map(shards.shard, grads, gradient_dims))
    scope = _ShardsScope(shards, dims, variables, gradient_dims)
    with scope, scope.shapes():
        original(self, grads, trainable_variables)
    for variable in scope.written.values():
        value = scope.get_current_value(variable)
        write(variable, shards.gather(value, dims[id(variable)]))
