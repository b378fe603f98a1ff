"""When a hook has something to do; each is asked at every call of a hooked function.

They return what they look for, which the hook then works with, or None.
"""

from typing import Any

from keras_strategy.core import context
from keras_strategy.hooks.hook import of_several
from keras_strategy.rules.ownership import strategy_of_model

# Not wrapped: some hooks ask hundreds of times in a step.
in_replica = of_several(context.distributed_replica)
in_replica_or_dry_run = of_several(context.replica_or_dry_run)
in_scope = context.current_scope
of_strategy = strategy_of_model


@of_several
def before_apply() -> Any:
    """The replica that is running, but inside `optimizer.apply`.

    There all replicas compute on equal inputs.
    """
    replica = context.distributed_replica()
    return None if replica is None or replica.step.is_applying else replica


@of_several
def in_step() -> Any:
    """The replica that is running, in a training step, where it speaks for its rows."""
    replica = context.distributed_replica()
    return None if replica is None or replica.step.row_weight is None else replica


@of_several
def in_distributed_scope() -> Any:
    """The strategy whose scope this thread is in, if it has several replicas."""
    strategy = context.current_scope()
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return None
    return strategy


@of_several
def in_scope_of_workers() -> Any:
    """The strategy whose scope this thread is in, if it is of several workers."""
    strategy = context.current_scope()
    return None if strategy is None or strategy.extended.cluster is None else strategy


@of_several
def of_distributed_strategy(model: Any) -> Any:
    """The strategy that a model trains under, if it has several replicas."""
    strategy = strategy_of_model(model)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return None
    return strategy


@of_several
def of_workers(model: Any) -> Any:
    """The strategy that a model trains under, if it is of several workers."""
    strategy = strategy_of_model(model)
    return None if strategy is None or strategy.extended.cluster is None else strategy
