"""Arrays that programs receive from variables and return to them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import put
from keras_strategy.backends.jax.marks import array_notes, no_array
from keras_strategy.backends.threads.scopes import unbuilt_variable_error


def donatable_arrays(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """Return the arrays of distinct variables, which the program may delete.

    Args:
        variables: The variables.
        sharding_of: Returns the sharding that the program was compiled for.
    """
    arrays = keras_state.arrays_of(variables)
    # No function call per variable, here and below: there may be hundreds.
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.donatable() is not array:
            arrays[i] = jnp.copy(_placed(variables[i], array, sharding_of))
    return arrays


def readable_arrays(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """Return the arrays of variables that a program only reads."""
    arrays = keras_state.arrays_of(variables)
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.placed() is not array:
            placed = _placed(variables[i], array, sharding_of)
            if placed is array:
                note.placed, note.donatable = weakref.ref(placed), no_array
            arrays[i] = placed
    return arrays


def set_program_outputs(variables: Sequence[Any], arrays: Sequence[jax.Array]) -> None:
    """Set variables to the arrays that a program created for them."""
    keras_state.set_arrays(variables, arrays)
    for note, array in zip(array_notes(variables), arrays, strict=True):
        note.donatable = note.placed = weakref.ref(array)


def without_weak_type(array: Any) -> Any:
    """Return the array with a strong dtype.

    A variable made from a Python number has a weak dtype. The program would be traced
    again when the first step has replaced it.
    """
    if not array.weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def no_value_error(variable: Any) -> RuntimeError:
    """Return the error for a variable that holds no array."""
    return RuntimeError(
        f"{unbuilt_variable_error(variable)} On JAX, Keras keeps the values of the model's variables "
        "outside of the variables during an epoch of `fit`, and during `evaluate` and "
        "`predict`: call `strategy.run` after the epoch."
    )


def _placed(
    variable: Any, value: jax.Array | None, sharding_of: Callable[[Any], Any]
) -> jax.Array:
    if value is None:
        raise no_value_error(variable)
    array: jax.Array = without_weak_type(value)
    sharding = sharding_of(variable)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return put(array, sharding)
