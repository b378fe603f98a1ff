"""Patches of Keras for sharded optimizers on TensorFlow."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import ops
from keras.optimizers import Optimizer

from keras_strategy.backends.tensorflow.replica import (
    SHARD,
    TensorFlowReplica,
    local_shard,
)
from keras_strategy.core.context import distributed_replica
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.patch import hook
from keras_strategy.keras_patches.sharded_slots import (
    apply_outside_replicas_error,
    optimizer_sharding_of,
)
from keras_strategy.keras_patches.sharded_updates import (
    ShardedUpdateScope,
    current_update_scope,
)
from keras_strategy.training.sharding import FlatShards, flat_shards_of
from keras_strategy.values import ReduceOp


class _VariableShard:
    """A replica's shard of a variable; of a slot the replica stores only its shard."""

    def __init__(
        self,
        replica: TensorFlowReplica,
        variable: Any,
        shares: FlatShards,
        is_slot: bool,
    ):
        self.shares, self.shape = shares, shares.shape_of(replica.id)
        self._replica, self._variable, self._is_slot = replica, variable, is_slot

    def read(self) -> Any:
        """Return the shard; of a slot the variable, which Keras may read later."""
        component = self._replica.component(stored_value(self._variable))
        if self._is_slot:
            return component
        return local_shard(component, self.shares, self._replica.id)

    def write(self, value: Any) -> None:
        """Write the shard; works inside a tf.cond, too."""
        if not self._is_slot:
            component = self._replica.component(stored_value(self._variable))
            full = tf.convert_to_tensor(component)
            if value.shape != full.shape:
                begin, end = self.shares.bounds[self._replica.id]
                flat = tf.reshape(full, [-1])
                pieces = [flat[:begin], tf.reshape(value, [-1]), flat[end:]]
                value = tf.reshape(tf.concat(pieces, 0), full.shape)
        self._replica.write_component(self._variable, value)


class _ReplicaShardsScope(ShardedUpdateScope):
    def __init__(
        self,
        replica: TensorFlowReplica,
        shards: dict[int, _VariableShard],
        variables: Sequence[Any],
        norms: Any,
    ):
        super().__init__(None, shards, variables)
        self._replica, self._norms = replica, norms

    def get_current_value(self, variable: Any) -> Any:
        shard = self.shards.get(id(variable))
        return None if shard is None else shard.read()

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        shard = self.shards.get(id(variable))
        if shard is None:
            self._replica.write(variable, value)
        else:
            shard.write(value)

    def squared_norms(self, squares: Sequence[Any]) -> Any:
        return self._norms


@hook(
    Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=optimizer_sharding_of,
)
def _apply_gradients(original, sharding, self, grads, trainable_variables):
    """Update each replica's shard by Keras's own code."""
    # Gradients were summed and unscaled before. Afterwards the weights are gathered, so
    # that constraints apply to full weights.
    replica: Any = distributed_replica()
    if replica is None:
        raise apply_outside_replicas_error(self)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    shards: dict[int, _VariableShard] = {}
    for variable in weights:
        shares = sharding.shards_for(variable, variable.shape)
        shards[id(variable)] = _VariableShard(replica, variable, shares, False)
    for variable in sharding.slots:
        shares = flat_shards_of(variable)
        assert shares is not None
        shards[id(variable)] = _VariableShard(replica, variable, shares, True)
    indices = sharding.gradient_indices(replica.id, trainable_variables)
    local_weights = [trainable_variables[index] for index in indices]
    gradients = []
    for index, weight in zip(indices, local_weights, strict=True):
        gradient = getattr(grads[index], SHARD, None)
        if gradient is None:
            shares = shards[id(weight)].shares
            gradient = local_shard(grads[index], shares, replica.id)
        gradients.append(gradient)
    norms = None
    if self.clipnorm or self.global_clipnorm:
        clipped = gradients
        if steps := self.gradient_accumulation_steps:
            # It clips the mean of the accumulated gradients, inside a tf.cond, where
            # replicas cannot run collectives.
            places = [self._get_variable_index(weight) for weight in local_weights]
            sums = [shards[id(self._accumulated_gradients[i])].read() for i in places]
            clipped = [(g + x) / steps for g, x in zip(gradients, sums, strict=True)]
        norms = _squared_norms(replica, clipped, indices, grads)
        # Keras takes the norms first, then adds up repeated rows when it clips.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    scope = _ReplicaShardsScope(replica, shards, [*weights, *sharding.slots], norms)
    with scope, scope.shapes():
        original(self, gradients, local_weights)
    changed = weights if self.ema_overwrite_frequency else trainable_variables
    full_values = replica.gather_shards(
        [shards[id(weight)].read() for weight in changed],
        [shards[id(weight)].shares for weight in changed],
    )
    for weight, value in zip(changed, full_values, strict=True):
        replica.write(weight, value)


@hook(Optimizer, "_var_key", "(self, variable)", when=current_update_scope)
def _var_key(original, scope, self, variable):
    """Look up a weight by its stored variable while the scope shows its shard."""
    return original(self, stored_value(variable))


def _squared_norms(
    replica: TensorFlowReplica,
    local_shards: list[Any],
    indices: list[int],
    grads: list[Any],
) -> tuple[list[Any], Any]:
    """Return the squared norms of `grads[indices]`, and their sum over all `grads`."""
    dtype = max((gradient.dtype for gradient in grads), key=lambda dtype: dtype.size)
    squares = [tf.zeros((), dtype)] * len(grads)
    for index, gradient in zip(indices, local_shards, strict=True):
        # By Keras's functions, for its treatment of repeated rows.
        squares[index] = ops.cast(ops.sum(ops.square(gradient)), dtype)
    norms = replica.all_reduce(ReduceOp.SUM, tf.stack(squares))
    return [norms[index] for index in indices], tf.reduce_sum(norms)
