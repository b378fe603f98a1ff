"""Which strategy a model, its variables and a distributed value belong to.

What is made in a scope is its strategy's. What comes from outside, such as an optimizer
that was made before, is adopted when it is used, see `hooks.adoption`.
"""

from typing import Any

import keras
from keras import ops

from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.values.distributed import (
    DistributedValues,
    of_another_strategy,
)
from keras_strategy.values.topology import Topology


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


def require_own(topology: Topology, method: str, value: DistributedValues) -> None:
    """Raises unless a value has one component for each replica of a strategy.

    Of which strategy a value is, it does not say, and strategies of as many replicas
    take each other's, as in tf.distribute. One with another number of components would
    lose some, or have none for some replicas.

    Args:
        topology: That of the strategy that was given it.
        method: The strategy's method, for the message.
        value: The value.

    Raises:
        ValueError: If it has another number.
    """
    replicas = len(topology.local_replicas)
    if value.count is not None and value.count != replicas:
        raise of_another_strategy(value, method, replicas)


def parts_of(strategy: Any, method: str, variable: Any) -> DistributedValues | None:
    """What the replicas hold of a variable.

    Args:
        strategy: The strategy that was given it.
        method: Its method, for the message.
        variable: The variable.

    Returns:
        One component for each replica; None for a variable of no strategy.

    Raises:
        ValueError: If it is of another strategy, of more replicas or fewer.
    """
    owner = strategy_of_variable(variable)
    if owner is None:
        return None
    parts = owner.extended.group.parts(variable)
    if owner is not strategy:
        require_own(strategy.extended.topology, method, parts)
    return parts


def value_of(strategy: Any, method: str, variable: Any) -> Any:
    """What a variable is where values are brought together.

    Args:
        strategy: The strategy that was given it.
        method: Its method, for the message.
        variable: The variable.

    Returns:
        What the replicas hold, if each has its own; else a tensor.

    Raises:
        ValueError: See `parts_of`.
    """
    if is_on_read(variable):
        owner = strategy_of_variable(variable)
        if owner is not None and owner.num_replicas_in_sync > 1:
            return parts_of(strategy, method, variable)
    # Of its own: variables are assigned in place on some backends.
    return ops.stop_gradient(ops.copy(variable.value))


def require_own_parts(strategy: Any, variable: Any) -> None:
    """Raises where a replica reads what each replica of another strategy holds.

    Args:
        strategy: The strategy of the replica.
        variable: A variable with `synchronization="on_read"`.

    Raises:
        ValueError: If it is of a strategy of other replicas.
    """
    owner = strategy_of_variable(variable)
    if owner is None or owner is strategy:
        return
    here, there = strategy.extended.topology, owner.extended.topology
    if (here.devices, here.num_replicas) != (there.devices, there.num_replicas):
        raise ValueError(
            f"The variable '{variable.path}' has synchronization='on_read', so that "
            f"each replica of {owner!r} holds its own value, and it was used by a "
            f"replica of {strategy!r}. Give `run` the value that `reduce` of its own "
            "strategy makes of it."
        )
