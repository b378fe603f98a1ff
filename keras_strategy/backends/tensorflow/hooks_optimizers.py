"""Optimizers: Keras's TensorFlow optimizer reduces inside its update.

Here gradients are reduced before the update, so each replica uses the backend-neutral
code.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.conditions import in_distributed_scope, in_replica
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.rules.sharding import flat_shards_of

in_stateless_scope = home_of(
    "in_stateless_scope", "keras.src.backend.common.stateless_scope"
).in_stateless_scope
_Optimizer = keras.optimizers.Optimizer
# The backend-neutral base class, which TensorFlow's overrides.
_NeutralOptimizer: Any = [
    cls for cls in _Optimizer.__mro__ if "_backend_update_step" in vars(cls)
][-1]


def _neutral(original, strategy, self, *args, **kwargs):
    """Call the backend-neutral method.

    Keras's method for TensorFlow reduces the gradients again, and updates the variables
    of all replicas from one place.
    """
    return getattr(_NeutralOptimizer, original.__name__)(self, *args, **kwargs)


_NEUTRAL = {
    "add_variable_from_reference": (
        "(self, reference_variable, name=None, initializer='zeros')"
    ),
    "_apply_weight_decay": "(self, variables)",
    "_backend_update_step": "(self, grads, trainable_variables, learning_rate)",
    "_overwrite_model_variables_with_average_value": "(self, trainable_variables)",
    "_backend_increment_gradient_accumulators": "(self, grads, acc_grads)",
}
if hasattr(_Optimizer, "_backend_maybe_overwrite_model_variables"):
    # Since Keras 3.16, with a merge_call that fails in replicas.
    _NEUTRAL["_backend_maybe_overwrite_model_variables"] = "(self, trainable_variables)"
for _name, _signature in _NEUTRAL.items():
    hook(_Optimizer, _name, _signature, when=in_distributed_scope)(_neutral)


@hook(
    _Optimizer,
    ("assign", "assign_add", "assign_sub"),
    "(self, variable, value)",
    when=in_distributed_scope,
)
def _assign_component(original, strategy, self, variable, value):
    """Write the replica's component or shard.

    TensorFlow's method writes to the variable's value, which for a sharded variable is
    a tensor.
    """
    replica: Any = distributed_replica()
    if in_stateless_scope() or _is_sharded(variable) or _writes_conditionally(replica):
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        return getattr(_NeutralOptimizer, original.__name__)(self, variable, value)
    if replica is None:
        return original(self, variable, value)
    if isinstance(variable, keras.Variable):
        variable = variable.value
    return original(self, replica.component(variable), value)


def _is_sharded(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and flat_shards_of(variable) is not None


def _writes_conditionally(replica: Any) -> bool:
    return replica is not None and not replica.writes_unconditionally


@hook(
    keras.optimizers.LossScaleOptimizer,
    "_tf_apply",
    "(self, grads, trainable_variables=None)",
    when=in_replica,
)
def _tf_apply(original, replica, self, grads, trainable_variables=None):
    """Skip Keras's merge_call, because the gradients are equal on all replicas.

    With a sharded optimizer, replicas run collectives while they apply gradients,
    which is impossible inside a tf.cond.
    """
    if replica.group_state.strategy.shard is None:
        return self._common_apply(grads, trainable_variables)
    finite = self.check_finite(grads)
    with replica.write_where(finite):
        self._stateful_handle_finite_grads(grads, trainable_variables)
    keras.ops.cond(finite, lambda: None, self._stateful_handle_non_finite_grads)
    return None
