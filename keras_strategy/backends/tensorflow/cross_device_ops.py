"""Reduction and concatenation of replica values, after a check of their types.

The check comes first because a collective that fails on unequal shapes makes TensorFlow
refuse all later ones.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.connection import list_devices, native_name
from keras_strategy.devices import resolve_devices
from keras_strategy.training import cross_device_ops as choices
from keras_strategy.training.reduction import (
    axes_to_reduce,
    cast_for_sum,
    check_same_dtype,
    num_entries,
)
from keras_strategy.values import ReduceOp

if TYPE_CHECKING:
    from keras_strategy.training.cross_device_ops import CrossDeviceOps


def check_same_layout(values: Sequence[Any]) -> None:
    """Raise `ValueError` if the replicas' tensors differ in dtype or shape."""
    check_same_dtype(values)
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return
    first = values[0].shape
    if not all(first.is_compatible_with(value.shape) for value in values[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be combined "
            "elementwise. Pass `axis` to combine rows, or use `gather` or "
            "`all_gather` to concatenate them. Received the shapes "
            f"{[tuple(value.shape) for value in values]}."
        )


def reduce_values(
    reduce_op: ReduceOp,
    values: Sequence[Any],
    axis: Any,
    replicas: int,
    sum_over_workers: Callable[[Any], Any],
) -> Any:
    """Return the sum or mean over the replicas, and over `axis` unless it is None."""
    values = [_addable(_tensor(value)) for value in values]
    if axis is None:
        check_same_layout(values)  # also sparse ones and those of unknown rank
        total = sum_over_workers(sum_values(values))
        return total if reduce_op is ReduceOp.SUM else divide(total, replicas)
    axes = axes_to_reduce(axis, [value.shape for value in values])
    check_same_dtype(values)
    total = sum_over_workers(
        sum_values([tf.reduce_sum(value, axes) for value in values])
    )
    if reduce_op is ReduceOp.SUM:
        return total
    return divide(total, sum_over_workers(sum(_count(x, axes) for x in values)))


def concat_values(values: Sequence[Any], axis: int) -> Any:
    """Concatenate the replicas' tensors along `axis`, where their sizes may differ."""
    values = [_tensor(value) for value in values]
    check_same_dtype(values)
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
    """Divide a sum by a count; the mean of integers is a float."""
    if isinstance(total, tf.IndexedSlices):
        values = divide(total.values, count)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    if not total.dtype.is_floating and not total.dtype.is_complex:
        total = tf.cast(total, tf.float64)
    return total / tf.cast(count, total.dtype)


def sum_values(values: Sequence[Any]) -> Any:
    """Return the sum of the replicas' tensors or `tf.IndexedSlices`."""
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
    return value if isinstance(value, tf.IndexedSlices) else cast_for_sum(value)


def _count(value: Any, axes: Sequence[int]) -> Any:
    if all(value.shape[axis] is not None for axis in axes):
        return num_entries(value.shape, axes)
    return num_entries(tf.shape(value), axes)


def native_cross_device_ops(
    choice: "CrossDeviceOps | None", devices: tuple[str, ...]
) -> Any:
    """Return native tf.distribute's class for the user's choice, or None."""
    on_cpu = all(device.startswith("cpu:") for device in devices)
    if choice is None:
        # On CPUs, collectives cost more than they save, and they do not work in the
        # loop of steps_per_execution.
        return tf.distribute.ReductionToOneDevice() if on_cpu else None
    if isinstance(choice, choices.ReductionToOneDevice):
        device = choice.reduce_to_device
        if device is not None:
            available = [*list_devices(), *list_devices("cpu")]
            device = native_name(resolve_devices([device], available)[0])
        return tf.distribute.ReductionToOneDevice(device)
    if isinstance(choice, choices.NcclAllReduce):
        if on_cpu:
            raise ValueError(
                "NcclAllReduce needs GPUs. Omit `cross_device_ops` to let TensorFlow "
                f"choose. Received: cross_device_ops={choice!r} for the devices "
                f"{list(devices)}"
            )
        return tf.distribute.NcclAllReduce(choice.num_packs)
    assert isinstance(choice, choices.HierarchicalCopyAllReduce)
    return tf.distribute.HierarchicalCopyAllReduce(choice.num_packs)
