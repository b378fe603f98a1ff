"""The strategy that a model, a variable or a distributed value belongs to.

What is made in a scope belongs to its strategy. Objects from outside, such as an
optimizer made before, are adopted when they are used.
"""

from typing import Any

import keras
from keras import ops

from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.values.distributed import (
    DistributedValues,
    wrong_strategy_error,
)
from keras_strategy.values.topology import ReplicaTopology


def strategy_of_variable(variable: Any) -> Any:
    """Return the strategy whose scope made or adopted a variable, or None."""
    return vars(variable).get("_ks_strategy")


def strategy_of_model(model: keras.Model) -> Any:
    """Return the strategy that a model trains under, or None.

    A model made outside of a scope, such as a wrapper, follows its variables.
    """
    strategy = vars(model).get("_ks_strategy")
    if strategy is not None:
        return strategy
    for variable in model.variables:
        strategy = strategy_of_variable(variable)
        if strategy is not None:
            return strategy
    return None


def set_owner(variable: Any, strategy: Any) -> None:
    """Register a variable with the strategy whose scope made it."""
    vars(variable)["_ks_strategy"] = strategy
    strategy.extended.variables[id(variable)] = variable


def check_component_count(topology: ReplicaTopology, method: str, value: DistributedValues) -> None:
    """Raise `ValueError` unless a value has one component per local replica.

    A value does not record its strategy: strategies of as many replicas accept each
    other's, as in tf.distribute.
    """
    replicas = len(topology.local_replicas)
    if value.count is not None and value.count != replicas:
        raise wrong_strategy_error(value, method, replicas)


def per_replica_values(strategy: Any, method: str, variable: Any) -> DistributedValues | None:
    """Return a variable's value on each replica; None if it has no strategy."""
    owner = strategy_of_variable(variable)
    if owner is None:
        return None
    parts = owner.extended.group.per_replica_value(variable)
    if owner is not strategy:
        check_component_count(strategy.extended.topology, method, parts)
    return parts


def cross_replica_value(strategy: Any, method: str, variable: Any) -> Any:
    """Return per-replica values of an on-read variable, else a copied tensor."""
    if is_sync_on_read(variable):
        owner = strategy_of_variable(variable)
        if owner is not None and owner.num_replicas_in_sync > 1:
            return per_replica_values(strategy, method, variable)
    # Of its own: variables are assigned in place on some backends.
    return ops.stop_gradient(ops.copy(variable.value))


def check_sync_on_read_owner(strategy: Any, variable: Any) -> None:
    """Raise if a replica reads another strategy's on-read variable."""
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
