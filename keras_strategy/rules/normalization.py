"""Statistics of the rows of all replicas, for BatchNormalization(synchronized=True)."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.row_weights import if_any_rows
from keras_strategy.values.distributed import ReduceOp


def moments(
    replica: Replica, x: Any, axes: Sequence[int], keepdims: bool
) -> tuple[Any, Any]:
    """Mean and variance over `axes` and over the replicas, differentiable.

    mean = sum(x) / n and variance = sum((x - mean)^2) / n, where the sums and the
    number n of entries are those of all replicas. A replica without rows counts
    nothing.

    Args:
        replica: The replica.
        x: A tensor, of the same rank and dimensions beside `axes` everywhere.
        axes: The dimensions to reduce.
        keepdims: Whether they stay, with size 1.

    Returns:
        The mean and the variance, in `x`'s dtype.
    """
    x = ops.convert_to_tensor(x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype in ("float16", "bfloat16"):
        # Sums over many rows leave the range, or the precision, of half floats.
        x = ops.cast(x, "float32")

    def total(tensor):
        part = ops.sum(tensor, axis=tuple(axes), keepdims=True)
        part = if_any_rows(replica.step.row_weight, part, ops.zeros_like(part))
        return replica.all_reduce(ReduceOp.SUM, part)

    count = total(ops.ones_like(x))
    mean = ops.divide_no_nan(total(x), count)
    variance = ops.divide_no_nan(total(ops.square(x - mean)), count)
    if not keepdims:
        mean = ops.squeeze(mean, tuple(axes))
        variance = ops.squeeze(variance, tuple(axes))
    return ops.cast(mean, dtype), ops.cast(variance, dtype)


def masked_moments(
    replica: Replica, x: Any, mask: Any, axes: Sequence[int]
) -> tuple[Any, Any]:
    """Mean and variance of the valid entries of all replicas, differentiable.

    As `BatchNormalization` computes them on one device, where epsilon is added to
    the number of valid entries.

    Args:
        replica: The replica.
        x: A tensor.
        mask: Which entries are valid, for all dimensions but the last.
        axes: The dimensions to reduce.

    Returns:
        The mean and the variance, for the dimensions that are left.
    """
    valid = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(x))
    valid = ops.cast(valid, "bool")

    def total(tensor):
        part = ops.sum(ops.where(valid, tensor, 0), axis=tuple(axes), keepdims=True)
        part = if_any_rows(replica.step.row_weight, part, ops.zeros_like(part))
        return replica.all_reduce(ReduceOp.SUM, part)

    count = total(ops.ones_like(x)) + keras.config.epsilon()
    mean = total(x) / count
    variance = total(ops.square(x - mean)) / count
    return ops.squeeze(mean, tuple(axes)), ops.squeeze(variance, tuple(axes))
