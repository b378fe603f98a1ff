"""The variables' arrays as programs get them, and which of them they may overwrite.

A program computes the new values in the memory of the old ones (JAX: donation), which
deletes the arrays that it got. It may do so with an array that a program made for the
variable and that nobody has read since: who reads `variable.value` may keep it, or what
shares its memory, such as a shard or what `jax.device_put` makes of it. Every other
array is copied first, once, since what the program returns is its own again.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax import marks
from keras_strategy.backends.jax.distribution import put
from keras_strategy.backends.threads.scopes import unbuilt


def to_overwrite(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """The variables' arrays, which the program may delete.

    Args:
        variables: The variables, each of them once.
        sharding_of: Gives the layout that the program was compiled for.
    """
    arrays = keras_state.arrays_of(variables)
    # No function is called for each variable, here and below: there may be hundreds.
    for i, mark in enumerate(marks.of(variables)):
        array = arrays[i]
        if array is None or mark.own() is not array:
            arrays[i] = jnp.copy(_placed(variables[i], array, sharding_of))
    return arrays


def to_read(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """The variables' arrays on all devices.

    Args:
        variables: The variables.
        sharding_of: Gives the layout that the program was compiled for.
    """
    arrays = keras_state.arrays_of(variables)
    for i, mark in enumerate(marks.of(variables)):
        array = arrays[i]
        if array is None or mark.placed() is not array:
            placed = _placed(variables[i], array, sharding_of)
            if placed is array:
                mark.placed, mark.own = weakref.ref(placed), marks.nothing
            arrays[i] = placed
    return arrays


def give(variables: Sequence[Any], arrays: Sequence[jax.Array]) -> None:
    """Gives variables what a program made for them."""
    keras_state.set_arrays(variables, arrays)
    for mark, array in zip(marks.of(variables), arrays, strict=True):
        mark.own = mark.placed = weakref.ref(array)


def strong(array: Any) -> Any:
    """An array whose dtype is not weak, as a variable made of a Python number's is.

    A program would be traced once more when the weak dtype is gone after a step.
    """
    if not array.weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def without_value(variable: Any) -> RuntimeError:
    """The error for a variable that holds no array."""
    return RuntimeError(
        f"{unbuilt(variable)} While an epoch of `fit` runs on JAX, or `evaluate` or "
        "`predict`, Keras keeps the values of the model's variables to itself: call "
        "`strategy.run` when the epoch has ended."
    )


def _placed(
    variable: Any, value: jax.Array | None, sharding_of: Callable[[Any], Any]
) -> jax.Array:
    if value is None:
        raise without_value(variable)
    array: jax.Array = strong(value)
    sharding = sharding_of(variable)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return put(array, sharding)
