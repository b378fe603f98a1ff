"""Loss denominators that span all replicas.

Keras divides the sum of a batch's losses by a number that it counts on the batch: its
rows, the sum of its sample weights, the valid entries of its mask. On a replica it
would count the local batch only. These functions compute the loss so that its weighted
sum over the replicas equals one device's loss.
"""

import math
from typing import Any

from keras import ops, tree

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.row_weights import where_has_rows
from keras_strategy.values.distributed import ReduceOp

# Keras's own names: losses whose denominator counts entries.
MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_values(
    replica: Replica, values: Any, sample_weight: Any, reduction: str | None
) -> Any:
    """Reduce one replica's weighted losses, as Keras's `reduce_values` does."""
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


def mask_weights(
    replica: Replica, mask: Any, dtype: Any, reduction: str | None
) -> Any:
    """Return the factor of each entry's weight that a mask implies.

    Where Keras weights valid entries by total / valid, both counts span all replicas.
    """
    valid = ops.cast(mask, dtype)
    if reduction not in ("mean", "sum_over_batch_size"):
        return valid
    total = _count(mask, dtype)
    if replica.step.row_weight is None:
        total = _shared(replica, total)
    return valid * ops.divide_no_nan(total, _shared(replica, ops.sum(valid)))


def gather_global_batch(replica: Replica, structure: Any) -> Any:
    """Gather the rows of the global batch, differentiably; scalars stay.

    The gradient of what all replicas compute from them, weighted by the optimizer, is
    that of one device.
    """

    def gather(x):
        if x is None:
            return None
        x = ops.convert_to_tensor(x)
        if len(x.shape) == 0:
            return x
        # A replica without rows works on a stand-in, which is none of the batch's.
        count = where_has_rows(replica.step.row_weight, ops.shape(x)[0], 0)
        return replica.all_gather(x[:count], 0)

    return tree.map_structure(gather, structure)


def _count(values: Any, dtype: Any) -> Any:
    shape = ops.convert_to_tensor(ops.shape(values), dtype="int32")
    return ops.cast(ops.prod(shape), dtype)


def _shared(replica: Replica, denominator: Any) -> Any:
    """Return the denominator of all replicas, times this replica's weight.

    (local sum) / (weight * global denominator), weighted by the optimizer, is the
    local summand of the global quotient.
    """
    weight = replica.step.row_weight
    denominator = where_has_rows(weight, denominator, ops.zeros_like(denominator))
    total = replica.all_reduce(ReduceOp.SUM, denominator)
    return total if weight is None else total * ops.cast(weight, total.dtype)
