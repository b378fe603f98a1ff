"""Which strategy a model and its variables belong to.

What is made in a scope is its strategy's. What comes from outside, such as an optimizer
that was made before, is adopted when it is used.
"""

from typing import Any

import keras


def strategy_of_variable(variable: Any) -> Any:
    """The strategy in whose scope a variable was made or adopted, or None."""
    return vars(variable).get("_ks_strategy")


def strategy_of_model(model: keras.Model) -> Any:
    """The strategy that a model trains under, or None.

    A model that was not made in a scope itself, as a wrapper of one that was, follows
    its variables.
    """
    strategy = vars(model).get("_ks_strategy")
    if strategy is not None:
        return strategy
    for variable in model.variables:
        strategy = strategy_of_variable(variable)
        if strategy is not None:
            return strategy
    return None


def belongs_to(variable: Any, strategy: Any) -> None:
    """Notes that a variable was made in the scope of a strategy."""
    vars(variable)["_ks_strategy"] = strategy
    strategy.extended.variables[id(variable)] = variable


def adopt_variables(strategy: Any, model: keras.Model) -> None:
    """Mirrors what a model needs and what was made outside the scope.

    An optimizer or a metric that was made before the scope was entered, or a layer
    of a model that was built elsewhere.
    """
    variables = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    adopt(strategy, variables)


def adopt(strategy: Any, variables: Any) -> None:
    """Makes initialized variables that belong to no strategy `strategy`'s.

    Raises:
        RuntimeError: If one of them belongs to another strategy.
    """
    strangers = []
    for variable in variables:
        owner = strategy_of_variable(variable)
        if owner is None and variable._value is not None:
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
        belongs_to(variable, strategy)
