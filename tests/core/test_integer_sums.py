"""Sums of booleans are counts, and those of small integers do not wrap."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.test_run import number, per_replica, results

# What two replicas hold, and the sum in NumPy's own arithmetic.
VALUES = {
    "bool": ([True, True, False], [True, False, False]),
    "uint8": ([200, 1, 0], [100, 255, 0]),
    "int8": ([100, -100, 0], [100, -100, 1]),
    "int16": ([30000, 1, 0], [30000, 1, 0]),
}


@pytest.mark.parametrize("dtype", VALUES)
def test_integer_sums_match_numpy(dtype, two):
    arrays = [np.array(value, dtype) for value in VALUES[dtype]]
    wanted = np.sum(arrays, axis=0)
    value = per_replica(two, *arrays)
    extended = two.extended

    def merge(strategy, x):
        return strategy.reduce("sum", x)

    def fn(x):
        replica = ks.get_replica_context()
        return [
            replica.all_reduce("sum", x),
            replica.merge_call(merge, args=(x,)),
            replica.all_reduce("mean", x),
        ]

    for compile in (True, False):
        total, merged, mean = two.run(
            fn, args=(value,), options=ks.RunOptions(compile=compile)
        )
        assert results(two, total) == results(two, merged) == [wanted.tolist()] * 2
        assert results(two, mean) == [(wanted / 2).tolist()] * 2
    (paired,) = extended.batch_reduce_to("sum", [(value, value)])
    assert results(two, paired) == [wanted.tolist()] * 2
    for found in (
        two.reduce("sum", value),
        extended.reduce_to("sum", value, destinations=extended.worker_devices[0]),
    ):
        assert number(found) == wanted.tolist()
        # The same on every backend.
        assert keras.backend.standardize_dtype(found.dtype) == "int32"
    assert number(two.reduce("sum", value, axis=0)) == np.sum(arrays)
    assert np.isclose(number(two.reduce("mean", value, axis=0)), np.mean(arrays))
    with ks.OneDeviceStrategy("cpu:0").scope():
        one = ks.get_strategy()
        alone = one.run(lambda: ks.get_replica_context().all_reduce("sum", arrays[0]))
    assert number(alone) == arrays[0].astype("int64").tolist()


def test_boolean_variable_is_refused(two):
    """The first replica's is taken, and a sum is whether any is true."""
    with two.scope():
        first, any_of_them = (
            keras.Variable(
                [False, False, False], dtype="bool", trainable=False, aggregation=how
            )
            for how in ("only_first_replica", "sum")
        )

    def fn(x):
        first.assign(x)
        any_of_them.assign(x)

    arrays = np.array([[False, True, False], [True, True, False]])
    two.run(fn, args=(per_replica(two, *arrays),))
    assert results(two, first) == [[False, True, False]] * 2
    assert results(two, any_of_them) == [[True, True, False]] * 2
