"""What was made outside of a scope and is used in it becomes the strategy's."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_strategy.hooks.variables import stored
from keras_strategy.rules.ownership import set_owner, strategy_of_variable
from keras_strategy.rules.sharding import creating_slots


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
