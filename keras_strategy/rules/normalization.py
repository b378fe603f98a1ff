"""Batch statistics over the rows of all replicas."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.reduction import num_entries
from keras_strategy.values.distributed import ReduceOp


def moments(
    replica: Replica, replicas: int, x: Any, axes: Sequence[int], mask: Any = None
) -> tuple[Any, Any]:
    """Return mean and variance over `axes` and replicas, differentiably.

    One collective: each replica contributes its number of entries, their sum, and their
    squared distances to the local mean. A plain difference of squares would lose the
    digits of values that vary little around a large mean. The gradient takes one more
    collective. Replicas without rows are ignored.

    Args:
        replica: The replica.
        replicas: The number of replicas, over all workers.
        x: A tensor of equal shape everywhere, except for `axes`.
        axes: The non-negative dimensions to reduce; all but one.
        mask: Valid entries, without the last dimension, or None. Like Keras, add an
            epsilon to their number.
    """
    weight = replica.step.row_weight
    has_rows = weight is None or weight > 0
    x = ops.convert_to_tensor(x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype in ("float16", "bfloat16"):
        # Sums over many rows leave the range, or the precision, of half floats.
        x = ops.cast(x, "float32")
    valid = None
    if mask is not None:
        valid = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(x))
        valid = ops.cast(valid, "bool")

    def added_up(tensor):
        if valid is not None:
            tensor = ops.where(valid, tensor, 0)
        return ops.sum(tensor, axis=tuple(axes), keepdims=True)

    total = added_up(x)
    if valid is None:
        count = ops.ones_like(total) * ops.cast(num_entries(ops.shape(x), axes), x.dtype)
    else:
        count = added_up(ops.ones_like(x))
    own_mean = ops.stop_gradient(total) / ops.maximum(count, 1)
    squares = added_up(ops.square(x - own_mean))  # whose gradient by the mean is 0

    told = ops.reshape(ops.stack([count, total, squares]), (1, 3, -1))
    # Each in a place of its own, so that nothing is added to it.
    place = ops.logical_and(ops.equal(ops.arange(replicas), replica.id), has_rows)
    told = ops.where(ops.reshape(place, (-1, 1, 1)), told, 0)
    told = replica.all_reduce(ReduceOp.SUM, told)

    counts, totals, squares = told[:, 0], told[:, 1], told[:, 2]
    count = ops.sum(counts, axis=0)
    if valid is None:
        count = ops.maximum(count, 1)
    else:
        count = count + keras.config.epsilon()
    mean = ops.sum(totals, axis=0) / count
    apart = totals / ops.maximum(counts, 1) - mean
    variance = ops.sum(squares + counts * ops.square(apart), axis=0) / count
    return ops.cast(mean, dtype), ops.cast(variance, dtype)
