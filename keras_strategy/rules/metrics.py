"""Metric state over all replicas, during a step."""

from collections.abc import Iterable
from typing import Any

from keras import ops

from keras_strategy.core.context import get_strategy
from keras_strategy.core.protocol import Replica
from keras_strategy.rules.aggregation import (
    is_sync_on_read,
    no_value_error,
    select_first_replica,
)
from keras_strategy.rules.reduction import cast_for_sum


def merged_values(replica: Replica, variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of on-read variables and their values over all replicas.

    One reduction covers them and all others that the step has assigned so far, since
    the results of other metrics are likely to be read next.
    """
    step = replica.step
    asked = {id(v): v for v in variables if is_sync_on_read(v)}
    if not asked.keys() <= step.on_read_merged.keys():
        unknown = {
            key: variable
            for key, variable in {**step.on_read_writes, **asked}.items()
            if key not in step.on_read_merged and (key in asked or _has_value(variable))
        }
        parts = [_part(replica, variable) for variable in unknown.values()]
        sums = replica.weighted_sum(parts, None)
        step.on_read_merged.update(zip(unknown, sums, strict=True))
        step.on_read_writes.clear()
    return [(v, ops.cast(step.on_read_merged[key], v.dtype)) for key, v in asked.items()]


def _has_value(variable: Any) -> bool:
    return variable.aggregation != "none"


def _part(replica: Replica, variable: Any) -> Any:
    """Return a replica's summand of an on-read variable's value."""
    if not _has_value(variable):
        raise no_value_error(variable)
    value = cast_for_sum(variable.value)
    if variable.aggregation == "only_first_replica":
        return select_first_replica(replica, value)
    if variable.aggregation == "mean":
        return value / get_strategy().num_replicas_in_sync
    return value
