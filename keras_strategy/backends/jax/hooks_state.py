"""What Keras keeps to itself and the JAX adapter reads or sets, under names of our own.

Nothing is replaced here: that is `hooks.py`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras

from keras_strategy.backends.threads.hooks import global_state, keras_seeds
from keras_strategy.hooks.hook import changed, home_of
from keras_strategy.hooks.variables import stored

get_stateless_scope = home_of(
    "get_stateless_scope", "keras.src.backend.common.stateless_scope"
).get_stateless_scope

is_symbolic = home_of(
    "in_symbolic_scope", "keras.src.backend.common.symbolic_scope"
).in_symbolic_scope

# Under which name Keras keeps the process's own seed generator.
SEED = "global_seed_generator"


def synchronize_state(model: keras.Model) -> None:
    """Gives the variables the values that Keras keeps to itself while it trains.

    The method lost its prefix in Keras 3.16.
    """
    method = getattr(model, "state_sync", None) or getattr(
        model, "jax_state_sync", None
    )
    if method is None:
        raise changed("Model.jax_state_sync", "is gone, and so is Model.state_sync")
    method()


def stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` of this thread, or None."""
    return get_stateless_scope()


def initialize_pending() -> None:
    """Initialises variables that were made in a trace; to be called outside."""
    with keras.StatelessScope():
        pass


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Lets code that a trace calls make variables with values, once and for all."""
    scope = get_stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def write(variable: Any, value: Any) -> None:
    """Assigns without bringing the replicas together: they have been."""
    scope = get_stateless_scope()
    if scope is None:
        variable._direct_assign(value)
    else:
        scope.add_update((variable, value))


def traced_value(variable: Any) -> Any:
    """What a variable is in the program that is being traced."""
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return variable._value if value is None else value


array_of = stored


def arrays_of(variables: Iterable[Any]) -> list[Any]:
    """The arrays that variables hold: one call in every step, for all of them."""
    return list(map(array_of, variables))


def set_array(variable: Any, array: Any) -> None:
    """Makes `array`, which has the variable's placement already, its value."""
    variable._value = array


def set_arrays(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
    """Makes each array its variable's value."""
    for variable, array in zip(variables, arrays, strict=True):
        variable._value = array


def set_layout(variable: Any, layout: Any) -> None:
    """Gives a variable a layout, and places its value by it."""
    variable._layout = layout
    variable._direct_assign(variable._value)


def sharding_of(variable: Any) -> Any:
    """The layout of a variable as JAX's, or None."""
    layout = variable._layout
    return getattr(layout, "backend_layout", layout)


def global_seed() -> Any:
    """The variable of the process's own seed generator; None if there is none."""
    generator = global_state.get_global_attribute(SEED)
    return None if generator is None else generator.state


def made_global_seed() -> Any:
    """The variable of the process's own seed generator, which is made if need be."""
    return keras_seeds.global_seed_generator().state


def is_global_seed(variable: Any) -> bool:
    """Whether a variable is the state of the process's own seed generator."""
    return variable is global_seed()


def release(variable: Any, array: Any) -> None:
    """Makes `array` a variable's value, bound to no devices."""
    variable._layout = None
    vars(variable).pop("_ks_strategy", None)
    variable._value = jax.numpy.asarray(jax.device_get(array))
