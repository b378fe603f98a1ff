"""Partitioners: functions that map a variable's shape and dtype to shard counts.

They are the `variable_partitioner` of tf.distribute's ParameterServerStrategy.
"""

import math
from typing import Any

import numpy as np

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner:
    """Base class of partitioners.

    Example:

    ```python
    import keras_strategy as ks

    class Rows(ks.experimental.partitioners.Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [min(shape[0], 2), *(1 for _ in shape[1:])]

    assert Rows()((10, 3), "float32") == [2, 1]
    ```
    """

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension.

        Args:
            shape: The variable's shape.
            dtype: The variable's dtype.
            axis: The dimension that is sharded.
        """
        raise NotImplementedError("A `Partitioner` must have a `__call__`.")


class _OneDimensionPartitioner(Partitioner):
    """Partitioner along one dimension; a subclass counts the shards."""

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension."""
        sizes = list(shape)
        if not -len(sizes) <= axis < len(sizes) or None in sizes:
            raise ValueError(
                "A variable of known shape is sharded along one of its dimensions. "
                f"Received: axis={axis} for the shape {tuple(sizes)}"
            )
        result = [1] * len(sizes)
        result[axis] = self._count(math.prod(map(int, sizes)), int(sizes[axis]), dtype)
        return result

    def _count(self, elements: int, rows: int, dtype: Any) -> int:
        raise NotImplementedError


class FixedShardsPartitioner(_OneDimensionPartitioner):
    """Partitioner into a fixed number of shards, at most one for each row.

    Args:
        num_shards: The number of shards.

    Example:

    ```python
    import keras_strategy as ks

    partitioner = ks.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    assert partitioner((10, 3), "float32") == [2, 1]
    ```
    """

    def __init__(self, num_shards: int):
        self._num_shards = num_shards

    def _count(self, elements: int, rows: int, dtype: Any) -> int:
        return min(rows, self._num_shards)


class MinSizePartitioner(_OneDimensionPartitioner):
    """Partitioner into as many shards as possible, each of a minimum size.

    Args:
        min_shard_bytes: The minimum size of a shard in bytes.
        max_shards: The maximum number of shards.
        bytes_per_string: The assumed size of a string in bytes.

    Raises:
        ValueError: If an argument is not positive.

    Example:

    ```python
    import keras_strategy as ks

    MinSizePartitioner = ks.experimental.partitioners.MinSizePartitioner
    partitioner = MinSizePartitioner(min_shard_bytes=4, max_shards=2)
    assert partitioner((6, 1), "float32") == [2, 1]
    ```
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ):
        _require_positive("min_shard_bytes", min_shard_bytes)
        _require_positive("max_shards", max_shards)
        _require_positive("bytes_per_string", bytes_per_string)
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def _count(self, elements: int, rows: int, dtype: Any) -> int:
        total = elements * _element_size(dtype, self._bytes_per_string)
        shards = math.ceil(total / self._min_shard_bytes)
        return max(1, min(rows, self._max_shards, shards))


class MaxSizePartitioner(_OneDimensionPartitioner):
    """Partitioner into as few shards as possible, each of a maximum size.

    Args:
        max_shard_bytes: The maximum size of a shard in bytes.
        max_shards: The maximum number of shards, which takes precedence over
            `max_shard_bytes`; None for no limit.
        bytes_per_string: The assumed size of a string in bytes.

    Raises:
        ValueError: If an argument is not positive.

    Example:

    ```python
    import keras_strategy as ks

    MaxSizePartitioner = ks.experimental.partitioners.MaxSizePartitioner
    assert MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32") == [6, 1]
    assert MaxSizePartitioner(max_shard_bytes=1024)((6, 1), "float32") == [1, 1]
    ```
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ):
        _require_positive("max_shard_bytes", max_shard_bytes)
        if max_shards is not None:
            _require_positive("max_shards", max_shards)
        _require_positive("bytes_per_string", bytes_per_string)
        self._max_shard_bytes = max_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def _count(self, elements: int, rows: int, dtype: Any) -> int:
        row_bytes = elements / rows * _element_size(dtype, self._bytes_per_string)
        rows_per_shard = max(1, math.floor(self._max_shard_bytes / row_bytes))
        shards = math.ceil(rows / rows_per_shard)
        return min(self._max_shards or shards, shards)


def _require_positive(argument: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"Argument `{argument}` must be positive. Received: {value}")


def _element_size(dtype: Any, bytes_per_string: int) -> int:
    # Keras's dtypes are strings, TensorFlow's have a name; NumPy accepts both.
    name = getattr(dtype, "name", dtype)
    return bytes_per_string if name == "string" else np.dtype(name).itemsize
