"""Random numbers: of a replica's rows alone, and the seed generators of a strategy.

TensorFlow's Philox generator is counter-based: each block of numbers is a function of
the key and the block's index. So a replica starts the generator at its first row, and
draws exactly what a single device draws for these rows. The functions otherwise do what
`keras.random`'s of the same name do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

# tf.random.Algorithm.PHILOX, which CPUs and GPUs choose.
_PHILOX = 1


def _uniform(
    shape: Any, begin: Any, seed: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype=None
) -> Any:
    op = tf.raw_ops.StatelessRandomUniformV2
    numbers = _draw_rows(begin, op, shape, seed, dtype or keras.config.floatx())
    low, high = tf.cast(minval, numbers.dtype), tf.cast(maxval, numbers.dtype)
    return numbers * (high - low) + low


def _normal(
    shape: Any, begin: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype=None
) -> Any:
    op = tf.raw_ops.StatelessRandomNormalV2
    numbers = _draw_rows(begin, op, shape, seed, dtype or keras.config.floatx())
    deviation = tf.convert_to_tensor(stddev, numbers.dtype)
    return numbers * deviation + tf.convert_to_tensor(mean, numbers.dtype)


def _dropout_mask(shape: Any, begin: Any, seed: Any, rate: float, dtype: Any) -> Any:
    op = tf.raw_ops.StatelessRandomUniformV2
    return _draw_rows(begin, op, shape, seed, dtype) >= rate


DRAW_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "uniform": _uniform,
    "normal": _normal,
    "dropout": _dropout_mask,
}


def _draw_rows(
    begin: Any, op: Callable[..., Any], shape: Sequence[Any], seed: Any, dtype: Any
) -> Any:
    """Draw a tensor that begins at row `begin` of what a single device draws.

    Args:
        begin: The first row.
        op: The raw operation, which takes a key and a counter.
        shape: The shape to draw.
        seed: Two integers, from Keras's `draw_seed`.
        dtype: The dtype.
    """
    dtype = tf.as_dtype(dtype)
    # As Keras converts its seed for TensorFlow.
    pair = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(
        seed=seed if seed.dtype == tf.int32 else pair
    )
    dims = tf.stack([tf.cast(dim, tf.int64) for dim in shape])
    before = tf.cast(begin, tf.int64) * tf.reduce_prod(dims[1:])
    # A block has 128 bits: two numbers of 64 bits, or four of fewer.
    block_size = 2 if dtype.size == 8 else 4
    low = counter[0] + tf.cast(before // block_size, tf.uint64)
    carry = tf.cast(low < counter[0], tf.uint64)
    skipped = before % block_size
    numbers = op(
        shape=[skipped + tf.reduce_prod(dims)],
        key=key,
        counter=tf.stack([low, counter[1] + carry]),
        alg=_PHILOX,
        dtype=dtype,
    )
    return tf.reshape(numbers[skipped:], shape)
