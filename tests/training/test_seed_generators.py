"""The process's own seed generator in `run`: one for all, and none is remembered."""

import keras
import numpy as np
import pytest

import keras_strategy as ks


def draw(x=None):
    return keras.random.uniform((2,))


def outside():
    return keras.ops.convert_to_numpy(draw())


def drawn(strategy, args=(), compiled=True):
    """What each replica draws; the first one draws what one device does."""
    numbers = strategy.run(draw, args, options=ks.RunOptions(compile=compiled))
    numbers = strategy.experimental_local_results(numbers)
    return np.array([keras.ops.convert_to_numpy(x) for x in numbers])


def on_one_device(seed):
    keras.utils.set_random_seed(seed)
    return [outside() for _ in range(4)]


@pytest.mark.needs_patch(
    "backends.threads.patches keras.src.random.seed_generator.global_seed_generator",
    backend="torch",
    case="True",
)
@pytest.mark.needs_patch(
    "keras.src.random.seed_generator.global_seed_generator",
    backend="tensorflow",
    case="True",
)
@pytest.mark.parametrize("compiled", [True, False])
def test_assigned_seed_reaches_run(compiled, two):
    """Also a program that was compiled before; and there is one row of numbers."""
    for seed in (1, 2, 1):
        expected = on_one_device(seed)
        keras.utils.set_random_seed(seed)
        first = drawn(two, compiled=compiled)
        seen = [first[0], drawn(two, compiled=compiled)[0], outside()]
        seen.append(drawn(two, compiled=compiled)[0])
        np.testing.assert_array_equal(seen, expected)
        assert not np.array_equal(first[0], first[1])


def test_two_strategies_and_batch_shapes(two, mirrored):
    three = mirrored(3)
    for rows in (2, 3, 2):  # of which two replicas get equal ones, and others
        shards = two.experimental_distribute_values_from_function(
            lambda c, rows=rows: np.ones(
                rows // 2 + rows % 2 * (c.replica_id_in_sync_group == 0), "float32"
            )
        )
        expected = on_one_device(7)
        keras.utils.set_random_seed(7)
        seen = [drawn(two, (shards,))[0], drawn(three)[0], drawn(two, (shards,))[0]]
        np.testing.assert_array_equal(seen, expected[:3])


@pytest.mark.full(keep_on="torch")
def test_recreated_seed_generator(two):
    drawn(two)
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    expected = outside()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(drawn(two)[0], expected)
