"""Reductions over replicas: dtypes, axes, order, batch statistics, time in them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocols import Replica
from keras_strategy.values import ReduceOp

# A size is None if tracing does not know it.
Shape = Sequence[int | None]

# Sums of these would wrap where NumPy's do not; sums of booleans are counts.
_SMALL = ("bool", "int8", "int16", "uint8", "uint16")


def cast_for_sum(value: Any) -> Any:
    """Return a tensor in its reduction dtype: int32 for small integers and booleans."""
    value = ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) in _SMALL:
        return ops.cast(value, "int32")
    return value


def is_float(tensor: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def check_same_dtype(values: Sequence[Any]) -> None:
    """Raise `ValueError` if the replicas' tensors differ in dtype."""
    # A silent cast would lose digits: float32 cannot represent 2**24 + 1.
    dtypes = [keras.backend.standardize_dtype(value.dtype) for value in values]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "The replicas' values must have the same dtype to be reduced. Received the "
            f"dtypes {dtypes}, in the order of the replicas. Cast them before, with "
            "`keras.ops.cast(value, dtype)`."
        )


def normalize_axes(axis: Any, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return the non-negative dimensions that `axis` names, () for None."""
    if axis is None:
        return ()
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if len(ranks) > 1 or not all(-rank <= i < rank for i in axes):
        raise ValueError(
            "Argument `axis` must name dimensions that the values have. Received: "
            f"axis={axis!r} for values of the shapes {list(map(tuple, shapes))}"
        )
    return tuple(i % rank for i in axes)


def axes_to_reduce(axis: Any, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return `normalize_axes`; check that the other dimensions match."""
    axes = normalize_axes(axis, shapes)
    left = [[n for i, n in enumerate(shape) if i not in axes] for shape in shapes]
    if not all(may_be_same(left[0], other) for other in left[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be reduced elementwise, "
            f"except for the reduced dimensions. Received: axis={axis!r} for values of "
            f"the shapes {list(map(tuple, shapes))}. Pass the `axis` in which they "
            "differ, or use `gather`."
        )
    return axes


def check_gatherable(values: Sequence[Any], axis: int) -> None:
    """Raise ValueError unless the components can be joined along `axis`."""
    others = [type(x).__name__ for x in values if not hasattr(x, "shape")]
    if others:
        raise ValueError(
            f"`gather` joins tensors and arrays. Received: values of types {others}"
        )
    shapes = [tuple(ops.shape(component)) for component in values]
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    if len(ranks) == 1 and -rank <= axis < rank:
        others = {shape[: axis % rank] + shape[axis % rank + 1 :] for shape in shapes}
        if len(others) == 1:
            check_same_dtype(values)
            return
    raise ValueError(
        "`gather` joins values of rank 1 or more with equal dimensions other than "
        f"`axis`. Received: axis={axis!r}, and values of shapes {shapes} in replica "
        "order."
    )


def _halves(replicas: range) -> tuple[range, range]:
    # As in a Merkle tree of RFC 6962: the largest power of two comes first.
    middle = replicas.start + (1 << (len(replicas) - 1).bit_length() - 1)
    return range(replicas.start, middle), range(middle, replicas.stop)


@functools.lru_cache(maxsize=1024)  # the same in each step
def find_subtrees(replicas: range, of: range) -> list[range]:
    """Return the largest subtrees of a tree of replicas that have only some of them."""
    if replicas.start <= of.start and of.stop <= replicas.stop:
        return [of]
    if replicas.start >= of.stop or of.start >= replicas.stop:
        return []
    return [tree for half in _halves(of) for tree in find_subtrees(replicas, half)]


def sum_in_tree(
    replicas: range, parts: Mapping[range, Any], add: Callable[[Any, Any], Any]
) -> Any:
    """Sum in the order of a binary tree, given the sums of its subtrees or leaves."""
    if replicas in parts:
        return parts[replicas]
    first, second = [sum_in_tree(half, parts, add) for half in _halves(replicas)]
    return add(first, second)


def num_entries(shape: Any, axes: Sequence[int]) -> Any:
    """Return how many entries of one replica's value are reduced to one."""
    return math.prod(shape[i] for i in axes)


def may_be_same(first: Shape, other: Shape) -> bool:
    """Return True if two shapes are equal in the sizes that are known."""
    return len(first) == len(other) and all(
        a == b or a is None or b is None for a, b in zip(first, other, strict=True)
    )


def moments(
    replica: Replica, replicas: int, x: Any, axes: Sequence[int], mask: Any = None
) -> tuple[Any, Any]:
    """Return mean and variance over `axes` and replicas, differentiably."""
    # `axes` are all dimensions but one. `mask` marks valid entries, without the last
    # dimension; like Keras, an epsilon is added to their number.
    # One collective: each replica contributes its number of entries, their mean and
    # their variance. Sums of squares would lose the digits of values that vary little
    # around a large mean. The gradient takes one more collective.
    weight = replica.step.row_weight
    has_rows = weight is None or weight > 0
    x = ops.convert_to_tensor(x)  # at least float32
    axes, valid = tuple(axes), None
    count = ops.cast(num_entries(ops.shape(x), axes), x.dtype)
    if mask is not None:
        valid = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(x))
        valid = ops.cast(valid, "bool")
        count = ops.sum(ops.cast(valid, x.dtype), axis=axes, keepdims=True)
    divisor = ops.maximum(count, 1)

    def mean_of(tensor):
        if valid is not None:
            tensor = ops.where(valid, tensor, 0)
        return ops.sum(tensor, axis=axes, keepdims=True) / divisor

    mean = mean_of(x)
    variance = mean_of(ops.square(x - ops.stop_gradient(mean)))  # its gradient is 0
    count = ops.broadcast_to(count, ops.shape(mean))
    statistics = ops.reshape(ops.stack([count, mean, variance]), (1, 3, -1))
    # The sum gathers: each replica fills its own row. This keeps the values exact.
    place = ops.logical_and(ops.equal(ops.arange(replicas), replica.id), has_rows)
    statistics = ops.where(ops.reshape(place, (-1, 1, 1)), statistics, 0)
    statistics = replica.all_reduce(ReduceOp.SUM, statistics)

    counts, means, variances = (statistics[:, i] for i in range(3))
    total = ops.sum(counts, axis=0)
    if valid is not None:
        total = total + keras.config.epsilon()
    shares = counts / total
    mean = ops.sum(shares * means, axis=0)
    variance = ops.sum(shares * (variances + ops.square(means - mean)), axis=0)
    return mean, variance


def compute_and_comm_fractions(
    spans: Iterable[tuple[float, float, bool]],
) -> tuple[float, float] | None:
    """Return the fractions of time in compute and in collectives; the rest is idle."""
    # `spans` has (begin, end, is_collective) of each operation in a trace. A collective
    # that overlaps with compute counts as compute, as nothing waits for it.
    marks: list[tuple[float, int, bool]] = []
    for begin, end, is_collective in spans:
        marks += [(begin, 1, is_collective), (end, -1, is_collective)]
    if not marks:
        return None
    marks.sort(key=lambda mark: mark[0])
    running, seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}
    for (time, change, is_collective), (next_time, *_) in itertools.pairwise(marks):
        running[is_collective] += change
        if running[False] or running[True]:
            seconds[not running[False]] += next_time - time
    total = (marks[-1][0] - marks[0][0]) or 1.0
    return seconds[False] / total, seconds[True] / total
