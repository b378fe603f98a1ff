"""Which strategy a model and its variables belong to.

What is made in a scope is its strategy's. What comes from outside, such as an optimizer
that was made before, is adopted when it is used, see `hooks.adoption`.
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
