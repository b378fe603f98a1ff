"""What is added up over replicas: in which dtype, over which axes, divided by what."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

# A size is None where a program that is traced does not know it yet.
Shape = Sequence[int | None]


# Sums of these would wrap where NumPy's do not, and those of booleans are counts.
_SMALL = ("bool", "int8", "int16", "uint8", "uint16")


def addable(value: Any) -> Any:
    """A tensor in the dtype in which the replicas' values are added up.

    Small integers and booleans add up in int32, all else in its own dtype.
    """
    value = ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) in _SMALL:
        return ops.cast(value, "int32")
    return value


def require_one_dtype(values: Sequence[Any]) -> None:
    """Refuses to make one tensor of tensors that differ in dtype.

    Engines that would cast them lose digits: float32 has no number for 2**24 + 1.

    Args:
        values: Each replica's tensor or array.

    Raises:
        ValueError: If they differ.
    """
    dtypes = [keras.backend.standardize_dtype(value.dtype) for value in values]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "The replicas' values must have the same dtype to be combined. Received "
            f"the dtypes {dtypes}, in the order of the replicas. Cast them before: "
            "`keras.ops.cast(value, dtype)`."
        )


def axes_of(axis: Any, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """The dimensions that `axis` names, from 0, in the shapes of all replicas.

    Args:
        axis: None, a number or several; from the end if negative.
        shapes: The shape of each replica's value.

    Raises:
        ValueError: If a value lacks one of them.
    """
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
    """`axes_of`, where what is left of the values is added up elementwise.

    Raises:
        ValueError: Also if that differs in shape.
    """
    axes = axes_of(axis, shapes)
    left = [[n for i, n in enumerate(shape) if i not in axes] for shape in shapes]
    if not all(_may_be_same(left[0], other) for other in left[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be combined elementwise, "
            f"but for the dimensions that are reduced. Received: axis={axis!r} for "
            f"values of the shapes {_listed(shapes)}. Give the `axis` in which they "
            "differ, or use `gather`."
        )
    return axes


def entries(shape: Any, axes: Sequence[int]) -> Any:
    """How many entries of one replica's value are added up to one.

    A mean divides by that of all replicas, which may have different numbers of rows.

    Args:
        shape: The shape of the value.
        axes: The dimensions that are reduced, from 0.
    """
    return math.prod(shape[i] for i in axes)


def _may_be_same(first: Shape, other: Shape) -> bool:
    return len(first) == len(other) and all(
        a == b or a is None or b is None for a, b in zip(first, other, strict=True)
    )


def _listed(shapes: Sequence[Shape]) -> list[tuple[int | None, ...]]:
    return [tuple(shape) for shape in shapes]
