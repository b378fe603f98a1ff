"""Dtypes, axes and divisors of reductions over replicas.

Batch statistics over the rows of all replicas.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocols import Replica
from keras_strategy.values import ReduceOp

# A size is None where a program that is traced does not know it yet.
Shape = Sequence[int | None]


# Sums of these would wrap where NumPy's do not, and those of booleans are counts.
_SMALL = ("bool", "int8", "int16", "uint8", "uint16")


def cast_for_sum(value: Any) -> Any:
    """Return a tensor in its reduction dtype: int32 for small integers and booleans."""
    value = ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) in _SMALL:
        return ops.cast(value, "int32")
    return value


def check_same_dtype(values: Sequence[Any]) -> None:
    """Raise `ValueError` if the replicas' tensors differ in dtype.

    A silent cast would lose digits: float32 cannot represent 2**24 + 1.
    """
    dtypes = [keras.backend.standardize_dtype(value.dtype) for value in values]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "The replicas' values must have the same dtype to be combined. Received "
            f"the dtypes {dtypes}, in the order of the replicas. Cast them before: "
            "`keras.ops.cast(value, dtype)`."
        )


def normalize_axes(axis: Any, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return the non-negative dimensions that `axis` names, () for None."""
    if axis is None:
        return ()
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if len(ranks) > 1 or not all(-rank <= i < rank for i in given):
        raise ValueError(
            "Argument `axis` must name dimensions that the values have. Received: "
            f"axis={axis!r} for values of the shapes {_listed(shapes)}"
        )
    return tuple(i % rank for i in given)


def axes_to_reduce(axis: Any, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return `axes_of`; check that the other dimensions match elementwise."""
    axes = normalize_axes(axis, shapes)
    left = [[n for i, n in enumerate(shape) if i not in axes] for shape in shapes]
    if not all(_may_be_same(left[0], other) for other in left[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be combined elementwise, "
            f"but for the dimensions that are reduced. Received: axis={axis!r} for "
            f"values of the shapes {_listed(shapes)}. Give the `axis` in which they "
            "differ, or use `gather`."
        )
    return axes


def num_entries(shape: Any, axes: Sequence[int]) -> Any:
    """Return how many entries of one replica's value are reduced to one."""
    return math.prod(shape[i] for i in axes)


def _may_be_same(first: Shape, other: Shape) -> bool:
    return len(first) == len(other) and all(
        a == b or a is None or b is None for a, b in zip(first, other, strict=True)
    )


def _listed(shapes: Sequence[Shape]) -> list[tuple[int | None, ...]]:
    return [tuple(shape) for shape in shapes]


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
        count = ops.ones_like(total) * ops.cast(
            num_entries(ops.shape(x), axes), x.dtype
        )
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
