"""What aggregation and synchronization of a `keras.Variable` mean: rules, no tensors.

A variable that is made in a scope is *mirrored*: every replica has a component, and
what replicas assign is brought together at once, by the variable's aggregation. With
`synchronization="on_read"` every replica keeps what it assigned, and reading outside
the replicas aggregates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.row_weights import if_any_rows
from keras_strategy.values.distributed import ReduceOp
from keras_strategy.values.topology import Topology


def is_on_read(variable: Any) -> bool:
    """Whether every replica keeps its own value until somebody reads."""
    return variable.synchronization == "on_read"


def adds_up(variable: Any) -> bool:
    """Whether an `assign_add` is to be brought together before it is added."""
    return not is_on_read(variable) and variable.aggregation in ("sum", "mean")


def aggregate(
    replica: Replica, variable: Any, value: Any, aggregation: str | None = None
) -> Any:
    """Brings together what the replicas assign to a mirrored variable, or add to it.

    Args:
        replica: The replica that assigns.
        variable: The variable, of aggregation "sum", "mean" or
            "only_first_replica".
        value: This replica's value, a tensor.
        aggregation: What stands for the variable's own, or None.

    Returns:
        The value for every replica, of the same dtype.
    """
    weight = replica.step.row_weight
    aggregation = aggregation or variable.aggregation
    if aggregation == "sum":
        # In a training step some replicas may have no rows.
        value = if_any_rows(weight, value, ops.zeros_like(value))
        total = replica.all_reduce(ReduceOp.SUM, value)
    elif aggregation == "only_first_replica":
        total = replica.all_reduce(ReduceOp.SUM, of_first_replica(replica, value))
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


def of_first_replica(replica: Replica, value: Any) -> Any:
    """What a replica adds to a sum that is to be the first one's value."""
    first = ops.equal(replica.id, 0)
    return ops.where(first, value, ops.zeros_like(value))


def assigned(replica: Replica, variable: Any, value: Any) -> Any:
    """Returns what a replica that assigns `value` shall write.

    Args:
        replica: The replica that assigns.
        variable: The variable.
        value: The value, a tensor of the variable's shape and dtype.

    Returns:
        The value for this replica's component.

    Raises:
        ValueError: If it may hold what each replica read, to be added up.
    """
    step = replica.step
    if is_on_read(variable):
        step.parts[id(variable)] = variable
        step.merged.pop(id(variable), None)
        return if_any_rows(step.row_weight, value, variable.value)
    if variable.aggregation == "none":
        step.assigned[id(variable)] = variable
        return value
    if (
        variable.aggregation == "sum"
        and step.row_weight is not None
        and id(variable) in step.read
    ):
        raise ValueError(
            f"The variable '{variable.path}' has aggregation=\"sum\" and was assigned "
            "in a training step that had read it: what the replicas assign is added "
            "up, and what was there already may be counted once for each of them. Add "
            "this replica's part with `assign_add`, which adds it once."
        )
    return aggregate(replica, variable, value)


def parts_outside(variable: Any, value: Any, replicas: int) -> tuple[Any, Any]:
    """What replicas hold of a variable that was assigned outside of them.

    What is read as a sum is dealt out in equal parts, so that it reads as what was
    assigned. Whole numbers need not divide: the first replica holds what is left. Of
    every other variable each replica holds what was assigned.

    Args:
        variable: The variable.
        value: What was assigned, a tensor.
        replicas: The number of replicas, over all workers.

    Returns:
        What the first of all replicas holds, and what each other one does.
    """
    if not is_on_read(variable) or variable.aggregation != "sum":
        return value, value
    if "int" not in keras.backend.standardize_dtype(value.dtype):
        share = value / replicas
        return share, share
    share = value // replicas
    return value - share * (replicas - 1), share


def local_parts_outside(variable: Any, value: Any, topology: Topology) -> list[Any]:
    """What each replica of this worker holds, see `parts_outside`."""
    first, other = parts_outside(variable, value, topology.num_replicas)
    return [first if replica == 0 else other for replica in topology.local_replicas]


def part_outside(
    variable: Any,
    values: Sequence[Any],
    topology: Topology,
    add: Callable[[Sequence[Any]], Any],
) -> Any:
    """What a worker adds to what an on_read variable is outside of the replicas.

    Args:
        variable: The variable.
        values: What each replica of this worker holds.
        topology: Where the replicas are.
        add: The sum of tensors of several devices.

    Returns:
        A tensor. The sum of all workers' is what the variable reads as.
    """
    if variable.aggregation == "only_first_replica":
        first = values[0]
        return first if topology.first == 0 else ops.zeros_like(first)
    total = add(values)
    if variable.aggregation == "mean":
        return ops.divide(total, topology.num_replicas)
    return total


def no_value(variable: Any) -> ValueError:
    """The error for an on_read variable that is read outside of the replicas."""
    return ValueError(
        f"The variable '{variable.path}' has synchronization='on_read' and "
        "aggregation='none', so it has no value outside of the replicas, and a metric "
        'that holds it no result. Make it with aggregation="sum", "mean" or '
        '"only_first_replica"; or read it in `strategy.run`, or use '
        "`experimental_local_results`."
    )
