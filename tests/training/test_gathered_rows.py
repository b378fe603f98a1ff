"""Functions of a user's own that gather, and compare, the rows of all replicas."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from tests.equality import models
from tests.equality.compare import assert_equal, scope, train
from tests.training.shared import alone, logged

BACKEND = keras.backend.backend()
# By batches of 8 the last one has a row for the first replica alone.
X, Y = models.regression(17)


def all_rows(x):
    replica: Any = ks.get_replica_context()
    return replica.all_gather(x, axis=0)


def scaled(x):
    return x / ops.max(ops.abs(all_rows(x)))


class Centered(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(all_rows(x), axis=0)


def functional():
    inputs = keras.Input((models.FEATURES,))
    x = layers.Dense(6, activation=scaled)(inputs)
    x = layers.Lambda(lambda x: x + ops.max(all_rows(x), axis=0))(x)
    x = layers.Activation(scaled)(Centered()(x))
    return models.compiled(keras.Model(inputs, layers.Dense(1)(x)))


@pytest.mark.full(keep_on="jax")
def test_gathering_layers_equal_one_device(mirrored, caplog):
    options = {"validation_data": (X[:11], Y[:11]), "predicted": None}
    one = alone(functional, X, Y, **options)
    assert_equal(one, train(mirrored(3), functional, X, Y, **options))
    # On JAX a warning says that 3 replicas compute batches of 8 rows slowly.
    assert BACKEND == "jax" or not logged(caplog)


@pytest.mark.full(keep_on="jax")
def test_gathering_layer_is_called_anywhere(two):
    results = []
    for strategy in (None, ks.OneDeviceStrategy("cpu:0"), two):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = functional()
            results.append(ops.convert_to_numpy(model(X)))
        results.append(ops.convert_to_numpy(model(X)))
        if strategy is not None:
            rows = next(iter(strategy.experimental_distribute_dataset([X[:16]])))
            outputs = strategy.gather(strategy.run(model, args=(rows,)), axis=0)
            expected = ops.convert_to_numpy(model(X[:16]))
            outputs = ops.convert_to_numpy(outputs)
            np.testing.assert_allclose(outputs, expected, atol=1e-5)
    for result in results:
        np.testing.assert_allclose(result, results[0], atol=1e-5)
