"""Access to Keras's thread state and to what its variables store, without patches."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np

from keras_strategy.keras_patches.patch import find_module

# Keras's thread state.
global_state = find_module(
    "GLOBAL_STATE_TRACKER get_global_attribute set_global_attribute",
    "keras.src.backend.common.global_state",
)
in_symbolic_scope = find_module(
    "in_symbolic_scope", "keras.src.backend.common.symbolic_scope"
).in_symbolic_scope

# A partial and `attrgetter` avoid a Python call; these are read in every step.
current_stateless_scope: Callable[[], Any] = functools.partial(
    global_state.get_global_attribute, "stateless_scope"
)
"""Return the stateless scope that this thread is in, or None."""

stored_value: Callable[[Any], Any] = attrgetter("_value")
"""Return the stored value in any scope; None if there is no value yet."""

stored_dtype: Callable[[Any], str] = attrgetter("_dtype")
"""Return the dtype of the stored value, also in an autocast scope."""

is_autocast: Callable[[Any], bool] = attrgetter("_autocast")
"""Return True if an autocast scope changes the dtype in which it is read."""


def byte_count(variable: Any) -> int:
    """Return the size of a whole variable in bytes."""
    # NumPy knows names such as "bfloat16": Keras imports `ml_dtypes`.
    return math.prod(variable.shape) * np.dtype(stored_dtype(variable)).itemsize


def as_stored(variable: Any, value: Any) -> Any:
    """Return a value as a tensor of the variable's dtype."""
    return variable._convert_to_tensor(value, dtype=variable._dtype)


def initialize(variable: Any, value: Any) -> None:
    """Replace the stored value of a variable by a value or the result of a function."""
    # The variable keeps its shape, which may differ from a stored shard's. Keras 3.16
    # mixes them up: on torch the stored value sets the shape, and on TensorFlow a
    # variable with a shape refuses values of another.
    shape, variable._shape = variable._shape, None
    try:
        variable._initialize(value)
    finally:
        variable._shape = shape


def is_in_layer() -> bool:
    """Return True during the call of a layer."""
    return global_state.get_global_attribute("current_call_ctx") is not None


@contextlib.contextmanager
def no_stateless_scope() -> Iterator[None]:
    """Let this thread create initialized variables."""
    scope = current_stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)
