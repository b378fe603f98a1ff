"""Where the JAX adapter extends Keras for variables that one device keeps.

Keras's program of a step is over all devices, and takes what is on all of them. So a
step begins by copying the variables there, and ends with them where they are kept.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.in_charge import distribution_from_home
from keras_strategy.hooks.hook import model_hook


def step_from_home(step: Callable, distribution: Any) -> Callable:
    """What Keras calls for a batch, with the variables brought there and back.

    Args:
        step: What Keras made.
        distribution: The layouts.
    """

    def function(state, iterator):
        outputs, state = step(distribution.fetched(state), iterator)
        return outputs, distribution.kept(state)

    return function


# The one in some versions of Keras, the other in others.
_LOOK_AT_LAYOUTS = tuple(
    name
    for name in ("_record_training_state_sharding_spec", "_get_state_sharding_spec")
    if hasattr(keras.Model, name)
)


@model_hook(_LOOK_AT_LAYOUTS, "(self)", when=distribution_from_home)
def _layouts(original, distribution, self):
    """In a step the variables are on all devices, though one keeps them between steps.

    Keras looks where they are before, and compiles the step for that.
    """
    variables = [*self.variables, *self.metrics_variables]
    if getattr(self, "optimizer", None) is not None:
        variables += self.optimizer.variables
    variables = [v for v in variables if keras_state.array_of(v) is not None]
    arrays = keras_state.arrays_of(variables)
    keras_state.set_arrays(variables, distribution.fetched(arrays))
    try:
        return original(self)
    finally:
        keras_state.set_arrays(variables, arrays)
