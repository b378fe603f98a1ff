"""Where `keras.Variable` is extended on every backend, and its private state."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.core import context
from keras_strategy.hooks.conditions import before_apply
from keras_strategy.hooks.hook import hook
from keras_strategy.rules import central
from keras_strategy.rules.aggregation import aggregates_assign_add, aggregate, aggregate_assignment
from keras_strategy.rules.draws import EndOfDryRun
from keras_strategy.rules.ownership import set_owner

# Without a call of Python's: they are asked for in every step.
stored: Callable[[Any], Any] = attrgetter("_value")
"""What a variable holds, whatever scope this is in; None if it has no value yet."""

stored_dtype: Callable[[Any], str] = attrgetter("_dtype")
"""The dtype of what a variable holds, whatever is read in an autocast scope."""

# The original: what increments come to is not brought together a second time.
_assign_as_is = keras.Variable.assign


@hook(keras.Variable, "__init__", ())
def _init(original, self, *args, **kwargs):
    """A variable belongs to the scope that it is made in."""
    trial = context.thread_state.dry_run
    if trial is not None and (trial.tests_row_independence or trial.draws is not None):
        raise EndOfDryRun("a variable is made")
    original(self, *args, **kwargs)
    strategy = context.current_scope()
    if strategy is not None:
        set_owner(self, strategy)


@hook(keras.Variable, "assign", "(self, value)", when=before_apply)
def _assign(original, replica, self, value):
    """What replicas assign is brought together."""
    value = as_stored(self, value)
    if self.aggregation == "none" and central.is_central_without_aggregation(self):
        return original(self, central.aggregate_central_assignment(replica, self, value))
    return original(self, aggregate_assignment(replica, self, value))


@hook(keras.Variable, ("assign_add", "assign_sub"), "(self, value)", when=before_apply)
def _assign_add(original, replica, self, value):
    """The increments of the replicas are brought together.

    Keras assigns `self + value`, of which the sum over the replicas would count the
    variable once for each of them.
    """
    if not aggregates_assign_add(self):
        return original(self, value)
    increment = aggregate(replica, self, as_stored(self, value))
    sign = -1 if original.__name__ == "assign_sub" else 1
    return _assign_as_is(self, ops.add(self.value, ops.multiply(increment, sign)))


def variables_of(model: keras.Model, metrics: bool = True) -> dict[str, Any]:
    """The variables of a model and its optimizers, by names that all backends have.

    Args:
        model: The model.
        metrics: Whether those of its metrics are among them.
    """
    groups: dict[str, Any] = {"model": model.variables}
    for name, value in vars(model).items():
        several = isinstance(value, list | tuple)
        for number, leaf in enumerate(value if several else [value]):
            if isinstance(leaf, keras.optimizers.Optimizer):
                groups[f"{name}/{number}"] = leaf.variables
    if metrics:
        groups["metrics"] = model.metrics_variables
    return {
        f"{group}/{number}": variable
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }


def byte_count(variable: Any) -> int:
    """How many bytes the whole of a variable takes."""
    # Names such as "bfloat16" are known to NumPy since Keras has imported `ml_dtypes`.
    return math.prod(variable.shape) * np.dtype(stored_dtype(variable)).itemsize


# --- private state of Keras


def as_stored(variable: Any, value: Any) -> Any:
    """A value as a tensor of the dtype in which a variable holds its own."""
    return variable._convert_to_tensor(value, dtype=variable._dtype)


def initialize(variable: Any, value: Any) -> None:
    """Makes what Keras stores for a variable anew, of a value or a function of none.

    The variable keeps its shape, where what is stored may be a part of it. Keras 3.16
    takes the one for the other: on torch what is stored gives the shape, and on
    TensorFlow what has a shape refuses to be stored with another.
    """
    shape, variable._shape = variable._shape, None
    try:
        variable._initialize(value)
    finally:
        variable._shape = shape
