"""Access to private state of Keras on JAX, without patches."""

from collections.abc import Iterable
from typing import Any

import jax
import keras

from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.patch import keras_changed_error
from keras_strategy.keras_patches.random import global_generator, keras_seeds


def synchronize_state(model: keras.Model) -> None:
    """Write the values that Keras's loop holds back to the variables."""
    # Renamed in Keras 3.16.
    for name in ("state_sync", "jax_state_sync"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise keras_changed_error(
        "Model.jax_state_sync", "is gone, and so is Model.state_sync"
    )


def initialize_pending() -> None:
    """Initialize variables that a trace created; call it outside of the trace."""
    with keras.StatelessScope():
        pass


def write(variable: Any, value: Any) -> None:
    """Assign a value that is already aggregated over the replicas."""
    scope = current_stateless_scope()
    if scope is None:
        variable._direct_assign(value)
    else:
        scope.add_update((variable, value))


def set_arrays(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable._value = array


def set_layout(variable: Any, layout: Any) -> None:
    """Set a variable's layout and move its value accordingly."""
    variable._layout = layout
    variable._direct_assign(variable._value)


def sharding_of(variable: Any) -> Any:
    """Return the JAX sharding of a variable, or None."""
    layout = variable._layout
    return getattr(layout, "backend_layout", layout)


def global_seed() -> Any:
    generator = global_generator()
    return None if generator is None else generator.state


def ensure_global_seed() -> Any:
    return keras_seeds.global_seed_generator().state


def is_global_seed(variable: Any) -> bool:
    return variable is global_seed()


def release(variable: Any, array: Any) -> None:
    """Set a variable's value, detached from all devices of a strategy."""
    variable._layout = None
    vars(variable).pop("_ks_strategy", None)
    variable._value = jax.numpy.asarray(jax.device_get(array))
