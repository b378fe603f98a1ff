"""The variables' arrays as programs get them, and which of them they may overwrite.

A program computes the new values in the memory of the old ones (JAX: donation), which
deletes the arrays that it got. It may do so with an array that a program made, that
nobody else holds, and of which no part was given away: `jax.device_put` returns an
array that shares its memory with what it was given. Every other array is copied first,
once, since what the program returns is its own again.
"""

import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategy.backends.jax import hooks
from keras_strategy.backends.jax.distribution import put

_MARK = "_ks_mark"


def _nothing() -> None:
    """A reference to no array."""


class _Mark:
    """What is known of the array that a variable holds.

    Attributes:
        array: A weak reference to the array that is meant: the variable may have been
            given another one since, of which nothing is known.
        own: Whether a program made it, for this variable alone.
    """

    __slots__ = ("array", "own")

    def __init__(self, array: Any = _nothing, own: bool = False):
        self.array = array
        self.own = own

    def __reduce__(self):
        return _Mark, ()  # of a copy of the variable, nothing is known


def to_overwrite(variables: Sequence[Any], everywhere: Any) -> list[jax.Array]:
    """The variables' arrays, which the program may delete.

    Args:
        variables: The variables, each of them once.
        everywhere: The layout that the program was compiled for.
    """
    arrays = hooks.arrays_of(variables)
    holders = _holders(arrays)
    for i, variable in enumerate(variables):
        mark = vars(variable).get(_MARK)
        if mark is None or not mark.own or mark.array() is not arrays[i]:
            arrays[i] = jnp.copy(_placed(arrays[i], everywhere))
        elif holders[i] > _UNSHARED:
            arrays[i] = jnp.copy(arrays[i])
    return arrays


def to_read(variables: Sequence[Any], everywhere: Any) -> list[jax.Array]:
    """The variables' arrays on all devices.

    Args:
        variables: The variables.
        everywhere: The layout that the program was compiled for.
    """
    arrays = hooks.arrays_of(variables)
    for i, variable in enumerate(variables):
        mark = vars(variable).get(_MARK)
        if mark is None or mark.array() is not arrays[i]:
            placed = _placed(arrays[i], everywhere)
            if placed is arrays[i]:
                vars(variable)[_MARK] = _Mark(weakref.ref(placed), own=False)
            arrays[i] = placed
    return arrays


def give(variables: Sequence[Any], arrays: Sequence[jax.Array]) -> None:
    """Gives variables what a program made for them."""
    hooks.set_arrays(variables, arrays)
    for variable, array in zip(variables, arrays, strict=True):
        mark = vars(variable).get(_MARK)
        if mark is None:
            vars(variable)[_MARK] = _Mark(weakref.ref(array), own=True)
        else:
            mark.array = weakref.ref(array)
            mark.own = True


def lend(variable: Any) -> None:
    """Notes that somebody gets a part of a variable's array, which must last."""
    mark = vars(variable).get(_MARK)
    if mark is not None:
        mark.own = False


def strong(array: Any) -> Any:
    """An array whose dtype is not weak, as a variable made of a Python number's is.

    A program would be traced once more when the weak dtype is gone after a step.
    """
    if not array.weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def _placed(array: jax.Array, everywhere: Any) -> jax.Array:
    array = strong(array)
    if array.sharding.is_equivalent_to(everywhere, array.ndim):
        return array
    return put(array, everywhere)


def _holders(arrays: list[Any]) -> list[int]:
    """How many hold each array, the list and this function among them."""
    return list(map(sys.getrefcount, arrays))


# What `_holders` counts where nobody but a variable holds its array.
_alone = types.SimpleNamespace(_value=object())
(_UNSHARED,) = _holders(hooks.arrays_of([_alone]))
