"""Row weights, which make N replicas train as one device does.

In a training step each replica carries its *weight*: its rows over the rows of the
global batch. A replica's loss is the mean over its local rows, and the outermost
`optimizer.apply` sums weight * gradient over the replicas. For a loss that is a mean
over rows, sum_r (n_r / n) * grad mean_r = grad mean: exactly the gradient of the
global batch, however unevenly the rows are split. A replica without rows has the
weight 0, and its results are ignored.

In `strategy.run` there is no weight (None): gradients are summed, as in tf.distribute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras


def split_rows(
    rows: Any, replicas: int, minimum: Callable[[Any, Any], Any] = min
) -> list[tuple[Any, Any]]:
    """Return (begin, end) of each replica's rows of a global batch.

    As in tf.distribute, every replica gets a block of ceil(rows / replicas) rows; the
    last ones may get fewer, or none. A trace that does not know `rows` passes its own
    `minimum` of two numbers.
    """
    block = -(-rows // replicas)
    return [
        (minimum(replica * block, rows), minimum((replica + 1) * block, rows))
        for replica in range(replicas)
    ]


def where_has_rows(weight: Any, value: Any, otherwise: Any) -> Any:
    """Return `value` on a replica that has rows, else `otherwise`."""
    if weight is None:
        return value
    if isinstance(weight, float) and weight > 0.0:
        return value
    # Also where the weight is known to be 0: a replica without rows must stay part of
    # what the others differentiate, or it would miss the gradient's collectives.
    return keras.ops.where(weight > 0, value, otherwise)


def apply_row_weight(tensor: Any, weight: Any) -> Any:
    """Return weight * tensor; exactly zero for weight 0, where `tensor` may be NaN."""
    if weight is None:
        return tensor
    zeros = keras.ops.zeros_like(tensor)
    if isinstance(weight, float):
        return tensor * weight if weight > 0.0 else zeros
    return keras.ops.where(
        weight > 0, tensor * keras.ops.cast(weight, tensor.dtype), zeros
    )


def weighted_mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the mean of one value per replica, weighted by rows."""
    total = None
    for value, weight in zip(values, weights, strict=True):
        value = keras.ops.convert_to_tensor(value)
        if "float" not in keras.backend.standardize_dtype(value.dtype):
            value = keras.ops.cast(value, "float32")
        part = apply_row_weight(value, weight)
        total = part if total is None else total + part
    return total
