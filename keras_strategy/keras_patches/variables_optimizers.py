"""Where `keras.Variable` is extended on every backend, and its private state.

Where Keras's optimizers are extended on every backend.

What was made outside of a scope and is used in it becomes the strategy's.
"""

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.context import DryRun, distributed_replica, thread_state
from keras_strategy.keras_patches.patch import (
    before_apply,
    hook,
    in_distributed_scope,
    of_several,
)
from keras_strategy.training import variable_sync
from keras_strategy.training.ownership import set_owner, strategy_of_variable
from keras_strategy.training.random import EndOfDryRun
from keras_strategy.training.sharding import creating_slots
from keras_strategy.training.variable_sync import (
    aggregate,
    aggregate_assignment,
    aggregates_assign_add,
)

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
    if self.aggregation == "none" and variable_sync.is_central_without_aggregation(
        self
    ):
        return original(
            self, variable_sync.aggregate_central_assignment(replica, self, value)
        )
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


_APPLY = "(self, grads, trainable_variables=None)"


@of_several
def _in_distributed_scope_or_trial() -> Any:
    """The strategy whose scope this thread is in; or the trial."""
    return in_distributed_scope() or thread_state.dry_run


_WHEN = _in_distributed_scope_or_trial


@hook(keras.optimizers.Optimizer, "apply", _APPLY, when=_WHEN)
@hook(keras.optimizers.LossScaleOptimizer, "apply", _APPLY, when=_WHEN)
def _apply(original, strategy, self, grads, trainable_variables=None):
    """The gradients are summed over the replicas first, once.

    Then Keras's own code clips, accumulates, scales and applies on every replica, on
    equal inputs. The outermost optimizer does it: LossScaleOptimizer calls another.
    """
    if isinstance(strategy, DryRun):
        if strategy.gradients is not None:
            strategy.gradients += grads
            return None
        raise EndOfDryRun("gradients are applied")
    replica = distributed_replica()
    if replica is None:
        strategy.extended.group.check_cross_replica_apply()
    if replica is None or replica.step.is_applying:
        return original(self, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if not self.built and trainable_variables is not None:

        def build():
            if not self.built:
                self.build(trainable_variables)
                self.built = True

        replica.once(build)
    present = [grad for grad in grads if grad is not None]
    replica.step.optimizer, replica.step.reducing_gradients_of = (
        self,
        trainable_variables,
    )
    if trainable_variables is not None and len(present) < len(grads):
        pairs = zip(grads, trainable_variables, strict=False)  # Keras counts them
        replica.step.reducing_gradients_of = [
            v for grad, v in pairs if grad is not None
        ]
    weight, own = replica.step.row_weight, strategy.extended.custom_reducer
    try:
        if own is None:
            summed = list(replica.weighted_sum(present, weight))
        else:
            summed = list(own.weighted_sum(replica, present, weight))
    finally:
        replica.step.optimizer = replica.step.reducing_gradients_of = None
    if len(summed) < len(grads):
        rest = iter(summed)
        summed = [None if grad is None else next(rest) for grad in grads]
    replica.step.is_applying = True
    try:
        return original(self, summed, trainable_variables)
    finally:
        replica.step.is_applying = False


def adopt_variables(strategy: Any, model: keras.Model) -> None:
    """Mirrors what a model needs and what was made outside the scope.

    An optimizer or a metric that was made before the scope was entered, or a layer
    of a model that was built elsewhere.
    """
    adopt(strategy, [*model.variables, *model.metrics_variables])
    with creating_slots():
        for optimizer in _optimizers(model):
            adopt(strategy, optimizer.variables)


def _optimizers(model: keras.Model) -> Iterator[keras.optimizers.Optimizer]:
    """Those that a model holds: Keras's one, or several of a user's own."""
    for value in vars(model).values():
        held = value.values() if isinstance(value, dict) else value
        for one in held if isinstance(value, dict | list | tuple) else (value,):
            if isinstance(one, keras.optimizers.Optimizer):
                yield one


def adopt(strategy: Any, variables: Any) -> None:
    """Makes initialized variables that belong to no strategy `strategy`'s.

    Raises:
        RuntimeError: If one of them belongs to another strategy.
    """
    strangers = []
    for variable in variables:
        owner = strategy_of_variable(variable)
        if owner is None and stored(variable) is not None:
            strangers.append(variable)
        elif owner not in (None, strategy):
            raise RuntimeError(
                f"Mixing different strategies: the variable '{variable.path}' was "
                f"made in the scope of {owner!r} and is used under {strategy!r}. "
                "Make the whole model in one scope."
            )
    if strangers:
        strategy.extended.group.adopt(strangers)
    for variable in strangers:
        set_owner(variable, strategy)
