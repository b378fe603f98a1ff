"""Joining the tensors of several replicas, after a look at their types.

A collective that fails on unequal shapes makes TensorFlow refuse all later ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.rules.reduction import (
    addable,
    axes_to_reduce,
    entries,
    require_one_dtype,
)
from keras_strategy.values.distributed import ReduceOp


def check_alike(values: Sequence[Any]) -> None:
    """Raises `ValueError` if the replicas' tensors differ in dtype or shape."""
    require_one_dtype(values)
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return
    first = values[0].shape
    if not all(first.is_compatible_with(value.shape) for value in values[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be combined "
            "elementwise. Give `axis` to combine rows, or use `gather` or "
            "`all_gather` to join them. Received the shapes "
            f"{[tuple(value.shape) for value in values]}."
        )


def reduce(
    reduce_op: ReduceOp,
    values: Sequence[Any],
    axis: Any,
    replicas: int | None = None,
    of_all: Callable[[Any], Any] = lambda total: total,
) -> Any:
    """Sum or mean over the replicas, and over `axis` unless it is None.

    Args:
        reduce_op: The operation.
        values: One tensor or number for each replica of this worker.
        axis: None, an int or a tuple of ints.
        replicas: The number of replicas, if it is not that of the values.
        of_all: Makes this worker's sum that of all workers.

    Raises:
        ValueError: If the shapes do not fit.
    """
    values = [_addable(_tensor(value)) for value in values]
    if axis is None:
        check_alike(values)  # also sparse ones, and such of unknown rank
        total = of_all(add(values))
        if reduce_op is ReduceOp.SUM:
            return total
        return divide(total, len(values) if replicas is None else replicas)
    axes = axes_to_reduce(axis, [value.shape for value in values])
    require_one_dtype(values)
    total = of_all(add([tf.reduce_sum(value, axes) for value in values]))
    if reduce_op is ReduceOp.SUM:
        return total
    return divide(total, of_all(sum(_count(value, axes) for value in values)))


def gather(values: Sequence[Any], axis: int) -> Any:
    """Concatenates the replicas' tensors.

    Args:
        values: One tensor for each replica.
        axis: The dimension along which they may differ.

    Raises:
        ValueError: If they are scalars, or differ in another dimension.
    """
    values = [_tensor(value) for value in values]
    require_one_dtype(values)
    shapes = [value.shape for value in values]
    received = f"Received: axis={axis!r} for values of the shapes {shapes}"
    rank = shapes[0].rank
    if any(shape.rank != rank for shape in shapes) or not -rank <= axis < rank:
        raise ValueError(
            "Only tensors of the same rank can be gathered, along a dimension that "
            f"they have; scalars cannot. {received}"
        )
    axis %= rank
    for i in range(rank):
        sizes = {shape[i] for shape in shapes if shape[i] is not None}
        if i != axis and len(sizes) > 1:
            raise ValueError(
                f"Tensors that are gathered along axis {axis} must have the same "
                f"sizes in all other dimensions. {received}"
            )
    return tf.concat(values, axis)


def divide(total: Any, count: Any) -> Any:
    """Divides a sum; the mean of whole numbers is a float."""
    if isinstance(total, tf.IndexedSlices):
        values = divide(total.values, count)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    if not total.dtype.is_floating and not total.dtype.is_complex:
        total = tf.cast(total, tf.float64)
    return total / tf.cast(count, total.dtype)


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Only tensors and numbers can be combined over the replicas. "
            f"Received: {value!r} of type {type(value).__name__}"
        ) from error


def _addable(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else addable(value)


def add(values: Sequence[Any]) -> Any:
    """The sum of the replicas' tensors.

    Raises:
        ValueError: If they are not of numbers.
    """
    if not isinstance(values[0], tf.IndexedSlices):
        if not values[0].dtype.is_numeric:
            raise ValueError(
                "Only numbers can be combined over the replicas. Received tensors of "
                f"the dtype {values[0].dtype.name}."
            )
        return tf.add_n(values)
    return tf.IndexedSlices(
        tf.concat([value.values for value in values], 0),
        tf.concat([value.indices for value in values], 0),
        values[0].dense_shape,
    )


def _count(value: Any, axes: Sequence[int]) -> Any:
    if all(value.shape[axis] is not None for axis in axes):
        return entries(value.shape, axes)
    return entries(tf.shape(value), axes)
