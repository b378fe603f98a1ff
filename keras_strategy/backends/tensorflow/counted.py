"""Random numbers of some rows, drawn without those of the rows before.

TensorFlow's numbers come of a counter: a block of them is a function of the key and of
the block's number, so the generator is started where a replica's rows begin. What it
draws there are the bits that one device draws. The functions do what Keras's of the
same name do with them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

# tf.random.Algorithm.PHILOX, which is what CPUs and GPUs choose.
_PHILOX = 1


def _uniform(
    shape: Any, begin: Any, seed: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype=None
) -> Any:
    draw = tf.raw_ops.StatelessRandomUniformV2
    numbers = _from(begin, draw, shape, seed, dtype or keras.config.floatx())
    low, high = tf.cast(minval, numbers.dtype), tf.cast(maxval, numbers.dtype)
    return numbers * (high - low) + low


def _normal(
    shape: Any, begin: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype=None
) -> Any:
    draw = tf.raw_ops.StatelessRandomNormalV2
    numbers = _from(begin, draw, shape, seed, dtype or keras.config.floatx())
    deviation = tf.convert_to_tensor(stddev, numbers.dtype)
    return numbers * deviation + tf.convert_to_tensor(mean, numbers.dtype)


def _kept(shape: Any, begin: Any, seed: Any, rate: float, dtype: Any) -> Any:
    draw = tf.raw_ops.StatelessRandomUniformV2
    return _from(begin, draw, shape, seed, dtype) >= rate


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "uniform": _uniform,
    "normal": _normal,
    "dropout": _kept,
}


def _from(
    begin: Any, draw: Callable[..., Any], shape: Sequence[Any], seed: Any, dtype: Any
) -> Any:
    """Draws from a place on.

    Args:
        begin: Where it begins in the first dimension of what one device draws.
        draw: Draws with a key and a counter.
        shape: The shape of what is drawn.
        seed: Two numbers, as Keras's `draw_seed` gives them.
        dtype: The dtype.
    """
    dtype = tf.as_dtype(dtype)
    # As Keras makes a seed of them for TensorFlow.
    pair = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(
        seed=seed if seed.dtype == tf.int32 else pair
    )
    dims = tf.stack([tf.cast(dim, tf.int64) for dim in shape])
    before = tf.cast(begin, tf.int64) * tf.reduce_prod(dims[1:])
    # A block is 128 bits, and gives two numbers of 64 or four smaller ones.
    block = 2 if dtype.size == 8 else 4
    low = counter[0] + tf.cast(before // block, tf.uint64)
    carried = tf.cast(low < counter[0], tf.uint64)
    skipped = before % block
    numbers = draw(
        shape=[skipped + tf.reduce_prod(dims)],
        key=key,
        counter=tf.stack([low, counter[1] + carried]),
        alg=_PHILOX,
        dtype=dtype,
    )
    return tf.reshape(numbers[skipped:], shape)
