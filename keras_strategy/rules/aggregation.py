"""What aggregation and synchronization of a `keras.Variable` mean: rules, no tensors.

A variable that is made in a scope is *mirrored*: every replica has a component, and
what replicas assign is brought together at once, by the variable's aggregation. With
`synchronization="on_read"` every replica keeps what it assigned, and reading outside
the replicas aggregates.
"""

from typing import Any

import keras

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


def aggregate(replica: Replica, variable: Any, value: Any) -> Any:
    """Brings together what the replicas assign to a mirrored variable.

    Args:
        replica: The replica that assigns.
        variable: The variable, of aggregation "sum", "mean" or
            "only_first_replica".
        value: This replica's value.

    Returns:
        The value for every replica.
    """
    weight = replica.step.row_weight
    if variable.aggregation == "sum":
        return replica.all_reduce(ReduceOp.SUM, value)
    if variable.aggregation == "mean":
        if weight is None:
            return replica.all_reduce(ReduceOp.MEAN, value)
        # In a training step a replica speaks for its rows.
        return replica.weighted_sum([value], weight)[0]
    first = keras.ops.equal(replica.id, 0)
    value = keras.ops.convert_to_tensor(value)
    mine = keras.ops.where(first, value, keras.ops.zeros_like(value))
    return replica.all_reduce(ReduceOp.SUM, mine)


def assigned(replica: Replica, variable: Any, value: Any) -> Any:
    """Returns what a replica that assigns `value` shall write.

    Args:
        replica: The replica that assigns.
        variable: The variable.
        value: The value, of the variable's shape.

    Returns:
        The value for this replica's component.
    """
    replica.step.written[id(variable)] = variable
    if is_on_read(variable):
        return if_any_rows(replica.step.row_weight, value, variable.value)
    if variable.aggregation != "none":
        return aggregate(replica, variable, value)
    return value


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


def is_averaged(variable: Any) -> bool:
    """Whether a training step averages what the replicas assigned, row by row.

    That rule keeps unannotated state such as the moving statistics of
    BatchNormalization the same everywhere.
    """
    return (
        not variable.trainable
        and variable.aggregation == "none"
        and not is_on_read(variable)
        and "float" in variable.dtype
    )
