"""Assignments to variables that one device keeps for all replicas.

The replicas' values must become one: by the variable's aggregation, by the table of
Keras's own state, or else it is an error, as in tf.distribute.
"""

from typing import Any

from keras_strategy.core import context
from keras_strategy.core.protocol import Replica
from keras_strategy.rules.aggregation import aggregate, is_sync_on_read
from keras_strategy.rules.state import AGGREGATION_HELP, StateRule, declare_state_rules, state_rule_of


def in_central_storage_scope() -> bool:
    """Return True in the scope of a strategy with a parameter device."""
    strategy = context.current_scope()
    return strategy is not None and strategy.parameter_device is not None


def declare_if_central(owner: Any) -> None:
    """Declare the state rules of a Keras object's variables if they are central."""
    if in_central_storage_scope():
        declare_state_rules(owner)


def is_central_without_aggregation(variable: Any) -> bool:
    """Return True if a central variable has no aggregation."""
    if is_sync_on_read(variable):
        return False
    owner = vars(variable).get("_ks_strategy")
    return owner is not None and owner.parameter_device is not None


def aggregate_central_assignment(replica: Replica, variable: Any, value: Any) -> Any:
    """Return what all replicas must write to a central variable."""
    rule = state_rule_of(variable)
    if rule is StateRule.EQUAL:
        return value
    if rule is StateRule.MEAN_OF_ROWS:
        return aggregate(replica, variable, value, "mean")
    raise ValueError(
        f"The variable '{variable.path}' is kept on one device for all replicas, and "
        "each of them assigns a value of its own. Make it with an aggregation that "
        f"says what becomes of these: {AGGREGATION_HELP}. Received a variable with "
        'aggregation="none".'
    )
