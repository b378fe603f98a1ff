"""Callbacks and scopes that reset Keras, or replace what `fit` uses."""

import keras
import numpy as np
import pytest

from tests.equality.compare import assert_equal, train
from tests.training.shared import alone

X = np.random.RandomState(0).randn(13, 4).astype("float32")
Y = X[:, :1] * 2 + 1
BACKEND = keras.backend.backend()


def compiled(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def assert_one_devices(two, make, callbacks=lambda: None, **fit):
    fit = {"predicted": 0, "shuffle": False, **fit}
    one = alone(make, X, Y, callbacks=callbacks(), **fit)
    assert_equal(one, train(two, make, X, Y, callbacks=callbacks(), **fit))


def clear():
    keras.utils.clear_session(free_memory=False)


def test_clear_session_in_callback(two):
    def callbacks():
        return [
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: clear())
        ]

    assert_one_devices(two, compiled, callbacks)


@pytest.mark.needs_patch(
    "keras.backend.clear_session", "keras.utils.clear_session", backend="jax"
)
@pytest.mark.needs_patch("_DefaultGraphStack.reset", backend="tensorflow")
def test_clear_session_in_scope(two):
    def make():
        keras.backend.clear_session(free_memory=False)
        dropout = keras.layers.Dropout(0.5, seed=1)  # it creates a variable
        clear()
        return compiled(keras.layers.Dense(3, "tanh"), dropout)

    assert_one_devices(two, make)


class Change(keras.callbacks.Callback):
    """Changes the model at the start of the second epoch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.change(self.model)


def compile_with_metric(model):
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.make_train_function(force=True)


def replace_optimizer(model):
    model.optimizer = keras.optimizers.SGD(0.05)
    model.make_train_function(force=True)


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("change", [compile_with_metric, replace_optimizer])
def test_change_in_callback(change, two):
    if BACKEND == "jax":
        pytest.skip("on one device Keras's `fit` fails, too")
    assert_one_devices(two, compiled, lambda: [Change(change)])
