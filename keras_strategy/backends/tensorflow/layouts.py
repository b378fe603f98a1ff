"""Layout rows: what a worker reports of a tensor before it sends the tensor.

A row of integers holds a key of the call, the dtype, the rank and the sizes, and room
for one scalar. All rows have one length, so workers that bring different tensors still
meet in the collective that reports the difference.
"""

import re
from typing import Any

import tensorflow as tf

MAX_RANK = 12
FIRST_DIMENSION = 3
_COMPARED_WIDTH = FIRST_DIMENSION + MAX_RANK
_SCALAR_WIDTH = 2
# Dtypes whose sums are exact, for scalars in a row and for checksums behind values.
EXACT_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


def encode_row(key: Any, tensor: Any, dtype: tf.DType, scalar: Any = None) -> Any:
    """Return the layout row of a tensor of known rank.

    Args:
        key: The number of the call that sends the tensor.
        tensor: The tensor.
        dtype: The dtype to report, which may differ from the one that is sent.
        scalar: A scalar to send in the row, of which `fits_in_row` is True.
    """
    rank = tensor.shape.rank
    bits: Any = [0] * _SCALAR_WIDTH
    if scalar is not None:
        bits = tf.reshape(tf.bitcast(scalar, tf.int32), [-1])
        bits = tf.pad(bits, [[0, _SCALAR_WIDTH - scalar.dtype.size // 4]])
    padding = [-1] * (MAX_RANK - rank)
    return tf.concat(
        [
            [key, dtype.as_datatype_enum, rank],
            tf.shape(tensor, tf.int32),
            padding,
            bits,
        ],
        0,
    )


def fits_in_row(tensor: Any) -> bool:
    """Return True if a tensor can be sent within a layout row.

    Depends only on dtype and rank, because a tf.function of one worker may know sizes
    that another worker's does not.
    """
    return tensor.shape.rank == 0 and tensor.dtype in EXACT_DTYPES


def sum_row_scalars(rows: Any, dtype: tf.DType) -> Any:
    """Return the sum of the scalars in all workers' rows."""
    bits = rows[:, _COMPARED_WIDTH:]
    if dtype.size == 4:
        bits = bits[:, 0]
    return tf.ensure_shape(tf.reduce_sum(tf.bitcast(bits, dtype)), ())


def compare_rows(rows: Any, axis: int | None) -> tuple[Any, Any]:
    """Return the compared columns of all workers' rows, and whether they are equal.

    Sizes along `axis` may differ.
    """
    layouts = rows[:, :_COMPARED_WIDTH]
    column = -1 if axis is None else FIRST_DIMENSION + axis
    ignored = tf.range(_COMPARED_WIDTH) == column
    return layouts, tf.reduce_all((layouts == layouts[:1]) | ignored)


def decode_rows(text: str, workers: int) -> list[tuple[int, list[Any]]]:
    """Return each worker's key and layout from an error message with compared rows."""
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    result: list[tuple[int, list[Any]]] = []
    for first in range(0, workers * _COMPARED_WIDTH, _COMPARED_WIDTH):
        key, dtype, rank, *dims = numbers[first : first + _COMPARED_WIDTH]
        result.append((key, [dims[:rank], tf.as_dtype(dtype).name]))
    return result
