"""Aggregation and synchronization of `keras.Variable`.

A variable made in a scope is *mirrored*: every replica has a component, and what
replicas assign is aggregated at once. With `synchronization="on_read"` every replica
keeps its own value, and a read outside the replicas aggregates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.row_weights import where_has_rows
from keras_strategy.values.distributed import ReduceOp
from keras_strategy.values.topology import ReplicaTopology


def is_sync_on_read(variable: Any) -> bool:
    """Return True if every replica keeps its own value until a read."""
    return variable.synchronization == "on_read"


def aggregates_assign_add(variable: Any) -> bool:
    """Return True if `assign_add` aggregates its operand first."""
    return not is_sync_on_read(variable) and variable.aggregation in ("sum", "mean")


def aggregate(
    replica: Replica, variable: Any, value: Any, aggregation: str | None = None
) -> Any:
    """Aggregate what the replicas assign or add to a mirrored variable.

    The result has `value`'s dtype. `aggregation` overrides the variable's.
    """
    weight = replica.step.row_weight
    aggregation = aggregation or variable.aggregation
    if aggregation == "sum":
        # In a training step some replicas may have no rows.
        value = where_has_rows(weight, value, ops.zeros_like(value))
        total = replica.all_reduce(ReduceOp.SUM, value)
    elif aggregation == "only_first_replica":
        total = replica.all_reduce(ReduceOp.SUM, select_first_replica(replica, value))
    elif weight is None:
        total = replica.all_reduce(ReduceOp.MEAN, value)
    else:
        # There a replica speaks for its rows.
        floats = value if _is_float(value) else ops.cast(value, "float64")
        total = replica.weighted_sum([floats], weight)[0]
    if _is_float(total) and not _is_float(value):
        total = ops.round(total)
    return ops.cast(total, value.dtype)


def _is_float(value: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(value.dtype)


def select_first_replica(replica: Replica, value: Any) -> Any:
    """Return the summand whose sum over replicas is the first one's value."""
    first = ops.equal(replica.id, 0)
    return ops.where(first, value, ops.zeros_like(value))


def aggregate_assignment(replica: Replica, variable: Any, value: Any) -> Any:
    """Return what a replica that assigns `value` must write.

    Raises:
        ValueError: If a sum variable was read before in a training step, so that its
            old value may be counted once per replica.
    """
    step = replica.step
    if is_sync_on_read(variable):
        step.on_read_writes[id(variable)] = variable
        step.on_read_merged.pop(id(variable), None)
        return where_has_rows(step.row_weight, value, variable.value)
    if variable.aggregation == "none":
        step.assigned[id(variable)] = variable
        return value
    if (
        variable.aggregation == "sum"
        and step.row_weight is not None
        and id(variable) in step.sum_variables_read
    ):
        raise ValueError(
            f"The variable '{variable.path}' has aggregation=\"sum\" and was assigned "
            "in a training step that had read it: what the replicas assign is added "
            "up, and what was there already may be counted once for each of them. Add "
            "this replica's part with `assign_add`, which adds it once."
        )
    return aggregate(replica, variable, value)


def split_assigned_value(variable: Any, value: Any, replicas: int) -> tuple[Any, Any]:
    """Return the first replica's and every other replica's part of a value.

    An on-read sum is divided, so that it reads as assigned; the first replica gets the
    remainder of integers. Other variables are assigned everywhere.
    """
    if not is_sync_on_read(variable) or variable.aggregation != "sum":
        return value, value
    if "int" not in keras.backend.standardize_dtype(value.dtype):
        share = value / replicas
        return share, share
    share = value // replicas
    return value - share * (replicas - 1), share


def split_for_local_replicas(variable: Any, value: Any, topology: ReplicaTopology) -> list[Any]:
    """Return `split_assigned_value` for each replica of this worker."""
    first, other = split_assigned_value(variable, value, topology.num_replicas)
    return [first if replica == 0 else other for replica in topology.local_replicas]


def local_contribution(
    variable: Any,
    values: Sequence[Any],
    topology: ReplicaTopology,
    add: Callable[[Sequence[Any]], Any],
) -> Any:
    """Return a worker's summand of an on-read variable's cross-replica value."""
    if variable.aggregation == "only_first_replica":
        first = values[0]
        return first if topology.first_local_replica == 0 else ops.zeros_like(first)
    total = add(values)
    if variable.aggregation == "mean":
        return ops.divide(total, topology.num_replicas)
    return total


def no_value_error(variable: Any) -> ValueError:
    """Return the error for a cross-replica read that has no aggregation."""
    return ValueError(
        f"The variable '{variable.path}' has synchronization='on_read' and "
        "aggregation='none', so it has no value outside of the replicas, and a metric "
        'that holds it no result. Make it with aggregation="sum", "mean" or '
        '"only_first_replica"; or read it in `strategy.run`, or use '
        "`experimental_local_results`."
    )
