"""The state of metrics over all replicas, while a step still runs."""

from collections.abc import Iterable
from typing import Any

from keras import ops

from keras_strategy.core.context import get_strategy
from keras_strategy.core.protocol import Replica
from keras_strategy.rules.aggregation import (
    is_on_read,
    no_value,
    of_first_replica,
)
from keras_strategy.rules.reduction import addable


def merged(replica: Replica, variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """What on_read variables hold over all replicas.

    One reduction for them and for all others that the step has assigned so far: the
    results of other metrics are likely to be asked for next.

    Args:
        replica: The replica.
        variables: Variables; those that are not on_read are left out.

    Returns:
        Pairs of a variable and its value.
    """
    step = replica.step
    asked = {id(v): v for v in variables if is_on_read(v)}
    if not asked.keys() <= step.merged.keys():
        unknown = {
            key: variable
            for key, variable in {**step.parts, **asked}.items()
            if key not in step.merged and (key in asked or _has_value(variable))
        }
        parts = [_part(replica, variable) for variable in unknown.values()]
        sums = replica.weighted_sum(parts, None)
        step.merged.update(zip(unknown, sums, strict=True))
        step.parts.clear()
    return [(v, ops.cast(step.merged[key], v.dtype)) for key, v in asked.items()]


def _has_value(variable: Any) -> bool:
    return variable.aggregation != "none"


def _part(replica: Replica, variable: Any) -> Any:
    """What a replica adds to an on_read variable's value."""
    if not _has_value(variable):
        raise no_value(variable)
    value = addable(variable.value)
    if variable.aggregation == "only_first_replica":
        return of_first_replica(replica, value)
    if variable.aggregation == "mean":
        return value / get_strategy().num_replicas_in_sync
    return value
