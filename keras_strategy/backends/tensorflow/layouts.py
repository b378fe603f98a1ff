"""What a worker says of a tensor before it travels, as a row of whole numbers.

A row holds a key, the dtype, the number of dimensions and these; behind them is room
for a scalar itself. All rows are of one length, so that workers who bring different
things still meet in the collective in which they find out.
"""

import re
from typing import Any

import tensorflow as tf

MOST_DIMENSIONS = 12
FIRST_DIMENSION = 3
# How many numbers are compared; and how many are room for a scalar.
_WIDTH = FIRST_DIMENSION + MOST_DIMENSIONS
_ROOM = 2
# In these the sums of what travels with a layout, or behind values, are exact.
EXACT = (tf.float32, tf.float64, tf.int32, tf.int64)


def row_of(key: Any, tensor: Any, dtype: tf.DType, scalar: Any = None) -> Any:
    """What a worker says.

    Args:
        key: A number of what the tensor is for.
        tensor: The tensor, whose number of dimensions is known.
        dtype: Its dtype, which may travel as another one.
        scalar: What fills the room: of a shape and dtype that `has_room` takes.
    """
    rank = tensor.shape.rank
    bits: Any = [0] * _ROOM
    if scalar is not None:
        bits = tf.reshape(tf.bitcast(scalar, tf.int32), [-1])
        bits = tf.pad(bits, [[0, _ROOM - scalar.dtype.size // 4]])
    padding = [-1] * (MOST_DIMENSIONS - rank)
    return tf.concat(
        [
            [key, dtype.as_datatype_enum, rank],
            tf.shape(tensor, tf.int32),
            padding,
            bits,
        ],
        0,
    )


def has_room(tensor: Any) -> bool:
    """Whether what travels can do so in a row.

    That follows from the dtype and the number of dimensions: a tf.function of one
    worker may know sizes that another one's does not.
    """
    return tensor.shape.rank == 0 and tensor.dtype in EXACT


def sum_of_scalars(rows: Any, dtype: tf.DType) -> Any:
    """The sum of what is in the room of all workers' rows."""
    bits = rows[:, _WIDTH:]
    if dtype.size == 4:
        bits = bits[:, 0]
    return tf.ensure_shape(tf.reduce_sum(tf.bitcast(bits, dtype)), ())


def compared(rows: Any, axis: int | None) -> tuple[Any, Any]:
    """What of the rows is compared, and whether it is the same.

    Args:
        rows: Those of all workers.
        axis: Along which the sizes may differ.
    """
    told = rows[:, :_WIDTH]
    column = -1 if axis is None else FIRST_DIMENSION + axis
    ignored = tf.range(_WIDTH) == column
    return told, tf.reduce_all((told == told[:1]) | ignored)


def read(text: str, workers: int) -> list[tuple[int, list[Any]]]:
    """Each worker's key and layout, out of a message that holds what was compared."""
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    result: list[tuple[int, list[Any]]] = []
    for first in range(0, workers * _WIDTH, _WIDTH):
        key, dtype, rank, *dims = numbers[first : first + _WIDTH]
        result.append((key, [dims[:rank], tf.as_dtype(dtype).name]))
    return result
