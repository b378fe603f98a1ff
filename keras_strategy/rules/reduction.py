"""Dtypes, axes and divisors of reductions over replicas."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

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
