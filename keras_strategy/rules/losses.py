"""Denominators of a loss that belongs to all replicas.

Keras divides the sum of a batch's losses by a number that it counts on the batch: its
rows, the sum of its sample weights, the valid entries of its mask. On a replica that
number is only its part. The functions here compute the loss so that the weighted sum
over the replicas (see row_weights.py) is what one device computes on the whole batch.
"""

import math
from typing import Any

from keras import ops, tree

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.row_weights import if_any_rows
from keras_strategy.values.distributed import ReduceOp

# Keras's own names: losses whose denominator counts entries.
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_values(
    replica: Replica, values: Any, sample_weight: Any, reduction: str | None
) -> Any:
    """Keras's `reduce_values`, for one replica of many.

    Args:
        replica: The replica.
        values: Losses of this replica's entries, already times their weights.
        sample_weight: The weights, or None.
        reduction: One of Keras's reductions.

    Returns:
        A scalar, or `values` where nothing is to be reduced.
    """
    if reduction in (None, "none") or len(values.shape) == 0:
        return values
    total, weight = ops.sum(values), replica.step.row_weight
    if reduction == "sum":
        if weight is None:
            return total
        # The optimizer multiplies by the weight; a sum is not to be weighted.
        return ops.divide_no_nan(total, ops.cast(weight, total.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        denominator = _shared(replica, ops.cast(ops.sum(sample_weight), total.dtype))
    else:
        # Entries are counted in proportion to rows, so in a step the local count
        # is already weight * global count, and no collective is needed.
        shape = tuple(values.shape)
        if weight is not None and all(isinstance(size, int) and size for size in shape):
            return total / math.prod(shape)
        denominator = _count(values, total.dtype)
        if weight is None:
            denominator = _shared(replica, denominator)
    return ops.divide_no_nan(total, denominator)


def valid_entries(
    replica: Replica, mask: Any, dtype: Any, reduction: str | None
) -> Any:
    """What a mask adds to the weights of a replica's entries.

    Args:
        replica: The replica.
        mask: Which entries are valid.
        dtype: The dtype of the losses.
        reduction: One of Keras's reductions.

    Returns:
        A factor for each entry, in `dtype`. Where Keras weights the valid entries by
        total / valid, these are counted over all replicas.
    """
    valid = ops.cast(mask, dtype)
    if reduction not in ("mean", "sum_over_batch_size"):
        return valid
    total = _count(mask, dtype)
    if replica.step.row_weight is None:
        total = _shared(replica, total)
    return valid * ops.divide_no_nan(total, _shared(replica, ops.sum(valid)))


def rows_of_all(replica: Replica, structure: Any) -> Any:
    """Gathers arrays that hold a row for each row of this replica, differentiably.

    The gradient of what all replicas compute of them, weighted by the optimizer, is
    the gradient of what one device computes.

    Args:
        replica: The replica, in a training step.
        structure: Tensors, arrays and scalars; None where something is absent.

    Returns:
        The structure with the rows of the global batch. A scalar stays what it is.
    """

    def gather(x):
        if x is None:
            return None
        x = ops.convert_to_tensor(x)
        if len(x.shape) == 0:
            return x
        # A replica without rows works on a stand-in, which is none of the batch's.
        count = if_any_rows(replica.step.row_weight, ops.shape(x)[0], 0)
        return replica.all_gather(x[:count], 0)

    return tree.map_structure(gather, structure)


def _count(values: Any, dtype: Any) -> Any:
    shape = ops.convert_to_tensor(ops.shape(values), dtype="int32")
    return ops.cast(ops.prod(shape), dtype)


def _shared(replica: Replica, denominator: Any) -> Any:
    """The denominator of all replicas, times this replica's weight.

    (local sum) / (weight * global denominator), weighted by the optimizer, is the
    local part of the global quotient.
    """
    weight = replica.step.row_weight
    denominator = if_any_rows(weight, denominator, ops.zeros_like(denominator))
    total = replica.all_reduce(ReduceOp.SUM, denominator)
    return total if weight is None else total * ops.cast(weight, total.dtype)
