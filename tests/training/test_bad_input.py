"""What is refused, with which words, and that nothing is changed by it."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.training.equality import largest

X = np.random.RandomState(7).randn(13, 4).astype("float32")
Y = np.random.RandomState(8).randn(13, 1).astype("float32")


def compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_a_model_made_outside_is_refused_inside(method, two):
    model = compiled()
    before = model.get_weights()
    with two.scope(), pytest.raises(ValueError, match="made outside of it"):
        getattr(model, method)(X, Y)
    assert largest(before, model.get_weights()) == 0
    model.fit(X, Y, verbose=0)  # on one device it still works


def test_another_strategys_model_is_refused(mirrored):
    first, second = mirrored(2), mirrored(3)
    with first.scope():
        model = compiled()
    with second.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)


def test_fit_inside_run_is_refused(two):
    with two.scope():
        model = compiled()
    with pytest.raises(RuntimeError, match="outside `strategy.run`"):
        two.run(lambda: model.fit(X, Y, verbose=0))
    model.fit(X, Y, verbose=0)


class Failing(keras.layers.Layer):
    fail = False

    def call(self, x):
        if type(self).fail:
            raise ArithmeticError("a layer failed")
        return x


def test_after_an_error_in_a_step_the_strategy_is_usable(two):
    with two.scope():
        model = keras.Sequential([keras.Input((4,)), Failing(), keras.layers.Dense(1)])
        model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    before = model.get_weights()
    Failing.fail = True
    try:
        with pytest.raises(ArithmeticError, match="a layer failed"):
            model.fit(X, Y, verbose=0)
    finally:
        Failing.fail = False
    assert not ks.has_strategy()
    assert largest(before, model.get_weights()) == 0
    model.fit(X, Y, verbose=0)
    assert largest(before, model.get_weights()) > 0


def test_rows_that_differ(two):
    with two.scope():
        model = compiled()
    model.train_on_batch(X, Y)
    before = model.get_weights()
    with pytest.raises((ValueError, TypeError)):
        model.train_on_batch(X, Y[:5])
    assert largest(before, model.get_weights()) == 0
    model.train_on_batch(X, Y)


def test_weights_of_the_wrong_shape(two):
    with two.scope():
        model = compiled()
    before = model.get_weights()
    with pytest.raises(ValueError):
        model.set_weights([np.zeros((2, 2)), np.zeros(1)])
    assert largest(before, model.get_weights()) == 0
