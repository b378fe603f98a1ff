"""Patches of Keras on JAX: trainer, variables, optimizers and random numbers."""

from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.in_charge import home_distribution
from keras_strategy.hooks.hook import model_hook


def step_from_home(step: Callable, distribution: Any) -> Callable:
    """Wrap Keras's step function for variables on one home device.

    Keras's program takes variables on all devices, so copy them there and back.
    """

    def function(state, iterator):
        outputs, state = step(distribution.from_home(state), iterator)
        return outputs, distribution.to_home(state)

    return function


# The names in different versions of Keras.
_STATE_SHARDING_METHODS = tuple(
    name
    for name in ("_record_training_state_sharding_spec", "_get_state_sharding_spec")
    if hasattr(keras.Model, name)
)


@model_hook(_STATE_SHARDING_METHODS, "(self)", when=home_distribution)
def _state_sharding(original, distribution, self):
    """Report shardings on all devices for variables that one device holds.

    Keras compiles the step for the shardings that it finds before the step.
    """
    variables = [*self.variables, *self.metrics_variables]
    if getattr(self, "optimizer", None) is not None:
        variables += self.optimizer.variables
    variables = [v for v in variables if keras_state.array_of(v) is not None]
    arrays = keras_state.arrays_of(variables)
    keras_state.set_arrays(variables, distribution.from_home(arrays))
    try:
        return original(self)
    finally:
        keras_state.set_arrays(variables, arrays)
