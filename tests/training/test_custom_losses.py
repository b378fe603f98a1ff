"""Losses of a user's own, of which it is not known what they do with the rows."""

import keras
from keras import layers, ops

from tests.equality import models
from tests.equality.compare import assert_equal, train
from tests.training.shared import alone

BACKEND = keras.backend.backend()
# By batches of 8 the last one has a row for the first replica alone.
X, Y = models.regression(17)


class Pairs(keras.losses.Loss):
    """Compares all rows with each other, and is called in Keras's stead."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        between = [y - ops.transpose(y) for y in (y_true, y_pred)]
        return ops.mean(ops.square(between[0] - between[1]))


def test_loss_with_custom_call_equals_one_device(mirrored):
    def make():
        inputs = keras.Input((models.FEATURES,))
        # Not a bias in the end, which differences do not see.
        outputs = layers.Dense(1, use_bias=False)(layers.Dense(8, "tanh")(inputs))
        return models.compiled(keras.Model(inputs, outputs), loss=Pairs())

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(mirrored(3), make, X, Y, predicted=0))


class Summing(layers.Layer):
    def __init__(self, name, mean):
        super().__init__(name=name)
        self.mean = mean

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype) if self.mean else 8.0
        self.add_loss(ops.sum(x) / rows)
        return x


def warned(caplog):
    return [r.getMessage() for r in caplog.records if "add_loss" in r.getMessage()]


def test_add_loss_is_row_weighted(two, caplog):
    def trained(strategy, mean):
        def make():
            return models.compiled(models.mlp(lambda: Summing("summing", mean)))

        return train(strategy, make, X, Y)

    one = trained(None, False)
    assert not warned(caplog)
    many = trained(two, False)
    if BACKEND == "jax":
        assert_equal(one, many)
        assert not warned(caplog)
        return
    (message,) = warned(caplog)
    assert "'summing'" in message and "divide" in message
    # What it says to do.
    assert_equal(trained(None, True), trained(two, True))
