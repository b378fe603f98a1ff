"""Random numbers of some rows are the bits that TensorFlow draws there for all."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow's generator", allow_module_level=True)

import tensorflow as tf

from keras_strategy.backends.tensorflow.random import DRAW_FUNCTIONS

# (rows in all, the first, how many, numbers for each)
PARTS = [(5, 3, 2, (3,)), (2, 1, 1, (1,)), (21, 11, 10, (5, 13)), (1001, 500, 501, ())]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("uniform", {"minval": -0.3, "maxval": 0.7}),
        ("normal", {"mean": 0.1, "stddev": 1.7}),
        ("dropout", {}),
    ],
)
def test_philox_numbers_are_bit_equal(name, given, dtype):
    for rows, begin, count, more in PARTS:
        for seed in (7, 2**31 - 1):
            part = DRAW_FUNCTIONS[name](
                shape=[count, *more],
                begin=begin,
                seed=tf.constant([seed, 5], tf.int64),
                dtype=dtype,
                **({"rate": 0.4} if name == "dropout" else given),
            )
            numbers = keras.random.SeedGenerator(seed)
            numbers.state.assign([seed, 5])
            if name == "dropout":
                ones = tf.ones((rows, *more), dtype)
                whole = keras.random.dropout(ones, 0.4, seed=numbers) != 0
            else:
                draw = getattr(keras.random, name)
                whole = draw((rows, *more), dtype=dtype, seed=numbers, **given)
            assert tf.reduce_all(part == whole[begin : begin + count])
