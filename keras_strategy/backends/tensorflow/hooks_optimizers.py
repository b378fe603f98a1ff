"""Where TensorFlow's optimizers of Keras do what one device's do, on each replica.

Keras has them reduce inside their update, and write all components from there. Here the
gradients are reduced before, so the code that is the same on all backends is enough.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.conditions import in_distributed_scope, in_replica
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.rules.sharding import shares_of

in_stateless_scope = home_of(
    "in_stateless_scope", "keras.src.backend.common.stateless_scope"
).in_stateless_scope
_Optimizer = keras.optimizers.Optimizer
# That of all backends, which TensorFlow's overrides.
_NeutralOptimizer: Any = [
    cls for cls in _Optimizer.__mro__ if "_backend_update_step" in vars(cls)
][-1]


def _neutral(original, strategy, self, *args, **kwargs):
    """The replicas take the method that is the same on all backends.

    Keras's for TensorFlow reduces the gradients once more, and updates the variables
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
    # From Keras 3.16 on, with a merge_call that fails in the replicas.
    _NEUTRAL["_backend_maybe_overwrite_model_variables"] = "(self, trainable_variables)"
for _name, _signature in _NEUTRAL.items():
    hook(_Optimizer, _name, _signature, when=in_distributed_scope)(_neutral)


@hook(
    _Optimizer,
    ("assign", "assign_add", "assign_sub"),
    "(self, variable, value)",
    when=in_distributed_scope,
)
def _on_own_component(original, strategy, self, variable, value):
    """The replica's own component is written, or its share of it.

    What TensorFlow's method writes to is the variable's value, which is no variable
    where replicas share it.
    """
    replica: Any = distributed_replica()
    if in_stateless_scope() or _is_shared(variable) or _is_conditional(replica):
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        return getattr(_NeutralOptimizer, original.__name__)(self, variable, value)
    if replica is None:
        return original(self, variable, value)
    if isinstance(variable, keras.Variable):
        variable = variable.value
    return original(self, replica.own(variable), value)


def _is_shared(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and shares_of(variable) is not None


def _is_conditional(replica: Any) -> bool:
    return replica is not None and not replica.writes_always


@hook(
    keras.optimizers.LossScaleOptimizer,
    "_tf_apply",
    "(self, grads, trainable_variables=None)",
    when=in_replica,
)
def _tf_apply(original, replica, self, grads, trainable_variables=None):
    """The gradients are equal on all replicas.

    Where these share what the optimizer keeps, they meet while they apply them, which
    they could not inside a tf.cond.
    """
    if replica.peers.strategy.shard is None:
        return self._common_apply(grads, trainable_variables)
    finite = self.check_finite(grads)
    with replica.writing_where(finite):
        self._stateful_handle_finite_grads(grads, trainable_variables)
    keras.ops.cond(finite, lambda: None, self._stateful_handle_non_finite_grads)
    return None
