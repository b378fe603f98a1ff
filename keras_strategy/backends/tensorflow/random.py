"""Random numbers of a replica's rows, and the seed generators of a strategy.

TensorFlow's Philox generator is counter-based: each block of numbers is a function of
the key and the block's index. So a replica starts the generator at its first row, and
draws exactly what a single device draws for these rows. The functions otherwise do what
`keras.random`'s of the same name do.

Keras's global seed generator has one variable, which replicas may not write, and
`keras.utils.set_random_seed` replaces it. So a strategy has two generators instead:
one with a variable that all programs share, and one with a component for each replica.
In each run the replicas start from the former's state, and it continues from the state
in which they end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.random import global_generator, set_global_generator

# tf.random.Algorithm.PHILOX, which CPUs and GPUs choose.
_PHILOX = 1
_UNIFORM: Any = tf.raw_ops.StatelessRandomUniformV2


def _uniform(
    shape: Any, begin: Any, seed: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype=None
) -> Any:
    numbers = _draw_rows(begin, _UNIFORM, shape, seed, dtype)
    low, high = tf.cast(minval, numbers.dtype), tf.cast(maxval, numbers.dtype)
    return numbers * (high - low) + low


def _normal(
    shape: Any, begin: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype=None
) -> Any:
    op = tf.raw_ops.StatelessRandomNormalV2
    numbers = _draw_rows(begin, op, shape, seed, dtype)
    deviation = tf.convert_to_tensor(stddev, numbers.dtype)
    return numbers * deviation + tf.convert_to_tensor(mean, numbers.dtype)


def _dropout_mask(shape: Any, begin: Any, seed: Any, rate: float, dtype: Any) -> Any:
    return _draw_rows(begin, _UNIFORM, shape, seed, dtype) >= rate


DRAW_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "uniform": _uniform,
    "normal": _normal,
    "dropout": _dropout_mask,
}


def _draw_rows(
    begin: Any, op: Callable[..., Any], shape: Sequence[Any], seed: Any, dtype: Any
) -> Any:
    """Draw a tensor that begins at row `begin` of what a single device draws."""
    # `seed` is the result of Keras's `draw_seed`; `op` takes a key and a counter.
    dtype = tf.as_dtype(dtype or keras.config.floatx())
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


class SeedGenerators:
    """Seed generators of one strategy, which are None until a replica draws."""

    def __init__(
        self, call_outside: Callable[..., Any], workers: TensorFlowWorkers | None
    ):
        self._call_outside = call_outside
        self._workers = workers
        self.process: Any = None
        self.replicas: Any = None
        self.starts = 0  # how often a run has begun to draw

    def refresh(self) -> None:
        """Follow `set_random_seed`, before a compiled program draws."""
        current = global_generator()
        if current is not self.process:
            self.start(current)
            set_global_generator(self.process)

    def start(self, current: Any) -> None:
        """Make `process` continue from Keras's generator in the calling thread."""
        self.starts += 1
        if self.process is None or current is not self.process:
            self._call_outside(lambda: self._copy_state(current), in_scope=False)
        if self.replicas is None:

            def create():
                self.replicas = keras.random.SeedGenerator(0, name="replicas_seed")

            self._call_outside(create)

    def finish(self, state: Any) -> None:
        """Make `process` continue from the state in which the replicas ended."""
        stored_value(self.process.state).assign(state)
        set_global_generator(self.process)

    def _copy_state(self, current: Any) -> None:
        if current is None:
            current = keras.random.SeedGenerator()
        state = tf.convert_to_tensor(stored_value(current.state))
        if self._workers is not None:
            (chiefs,) = self._workers.broadcast_if_different(
                "the seed generator", [state]
            )
            state = state if chiefs is None else chiefs
        if self.process is None:
            self.process = keras.random.SeedGenerator(0, name="seed_generator")
        stored_value(self.process.state).assign(state)
