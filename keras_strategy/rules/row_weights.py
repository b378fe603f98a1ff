"""The one number that makes N replicas train as one device does.

In a training step each replica carries its *weight*: its rows over the rows of the
global batch. The loss that a replica computes is the mean over its own rows, and the
outermost `optimizer.apply` sums weight * gradient over the replicas. For a loss that
is a mean over rows, sum_r (n_r / n) * grad mean_r = grad mean: exactly the gradient
of the global batch, however unevenly the rows were split. A replica without rows has
the weight 0, and whatever it computed counts nothing.

In `strategy.run` there is no weight (None): gradients are plainly summed, as
tf.distribute does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras


def split_rows(
    rows: Any, replicas: int, minimum: Callable[[Any, Any], Any] = min
) -> list[tuple[Any, Any]]:
    """Where each replica's rows of a global batch begin and end.

    As tf.distribute does, every replica gets a block of ceil(rows / replicas)
    rows; the last ones may get fewer, or none.

    Args:
        rows: Rows of the global batch.
        replicas: The number of replicas.
        minimum: The smaller of two numbers, where a trace does not know `rows` yet.

    Returns:
        A list of (begin, end), one for each replica.
    """
    block = -(-rows // replicas)
    return [
        (minimum(replica * block, rows), minimum((replica + 1) * block, rows))
        for replica in range(replicas)
    ]


def if_any_rows(weight: Any, value: Any, otherwise: Any) -> Any:
    """Returns `value` on a replica that has rows, else `otherwise`.

    Args:
        weight: The replica's weight: a float, a scalar tensor, or None.
        value: A tensor.
        otherwise: A tensor of the same shape.
    """
    if weight is None:
        return value
    if isinstance(weight, float) and weight > 0.0:
        return value
    # Also where the weight is known to be 0: a replica without rows must stay part of
    # what the others differentiate, or it would miss the gradient's collectives.
    return keras.ops.where(weight > 0, value, otherwise)


def weighted(tensor: Any, weight: Any) -> Any:
    """Returns weight * tensor, and zeros where there are no rows.

    A replica without rows may have computed NaN, which a product would keep.

    Args:
        tensor: A tensor.
        weight: The replica's weight, or None for 1.
    """
    if weight is None:
        return tensor
    zeros = keras.ops.zeros_like(tensor)
    if isinstance(weight, float):
        return tensor * weight if weight > 0.0 else zeros
    return keras.ops.where(
        weight > 0, tensor * keras.ops.cast(weight, tensor.dtype), zeros
    )


def weighted_mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Mean of the replicas' values, weighted by rows.

    Args:
        values: One tensor or number for each replica.
        weights: Their weights, which add up to 1.
    """
    total = None
    for value, weight in zip(values, weights, strict=True):
        value = keras.ops.convert_to_tensor(value)
        if "float" not in keras.backend.standardize_dtype(value.dtype):
            value = keras.ops.cast(value, "float32")
        part = weighted(value, weight)
        total = part if total is None else total + part
    return total
