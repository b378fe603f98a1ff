"""What replicas may assign to variables that one device keeps for all of them.

There is one value, so what the replicas assign must come to one. By the variable's
aggregation it does, as everywhere. Of Keras's own variables without one it is known
what they come to; for all others it is an error, as in tf.distribute.
"""

from typing import Any

from keras_strategy.core import context
from keras_strategy.core.protocol import Replica
from keras_strategy.rules.aggregation import aggregate, is_on_read
from keras_strategy.rules.state import SPELLINGS, Rule, declare, declared


def in_charge() -> bool:
    """Whether this thread is in the scope of a strategy that keeps variables so."""
    strategy = context.current_scope()
    return strategy is not None and strategy.parameter_device is not None


def note(owner: Any) -> None:
    """Notes what the variables come to that an object of Keras's assigns."""
    if in_charge():
        declare(owner)


def is_unsaid(variable: Any) -> bool:
    """Whether a variable without an aggregation is kept so."""
    if is_on_read(variable):
        return False
    owner = vars(variable).get("_ks_strategy")
    return owner is not None and owner.parameter_device is not None


def assigned(replica: Replica, variable: Any, value: Any) -> Any:
    """What a replica that assigns to such a variable shall write.

    Args:
        replica: The replica.
        variable: The variable.
        value: The value, a tensor of the variable's shape and dtype.

    Returns:
        The value, the same on all replicas.

    Raises:
        ValueError: If it may differ between them.
    """
    rule = declared(variable)
    if rule is Rule.ALIKE:
        return value
    if rule is Rule.MEAN_OF_ROWS:
        return aggregate(replica, variable, value, "mean")
    raise ValueError(
        f"The variable '{variable.path}' is kept on one device for all replicas, and "
        "each of them assigns a value of its own. Make it with an aggregation that "
        f"says what becomes of these: {SPELLINGS}. Received a variable with "
        'aggregation="none".'
    )
