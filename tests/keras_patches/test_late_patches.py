"""Hooks that several replicas need come when others have been at work for long."""

import threading

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed.test_training import equal

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(13, 1)).astype("float32")


class Errors(keras.metrics.Metric):
    """A sum of errors, with a result of its own."""

    def __init__(self) -> None:
        super().__init__(name="errors")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None) -> None:
        """Adds a batch's errors."""
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def result(self):
        """The sum."""
        return self.total / 2.0


class Own(keras.Model):
    """Returns the results of its metrics, among other logs."""

    def __init__(self, dense: keras.Layer, errors: keras.metrics.Metric) -> None:
        super().__init__()
        self.dense, self.errors = dense, errors

    def call(self, x):
        """A linear function."""
        return self.dense(x)

    if keras.backend.backend() != "jax":  # where it is another function

        def train_step(self, data):
            """As Keras's, with the errors that were made."""
            logs = super().train_step(data)
            x, y = data
            self.errors.update_state(y, self(x))
            return {"loss": logs["loss"], "errors": self.errors.result()}


def trained(make_strategy, early: bool) -> list:
    """Return a model's weights; if `early`, its parts are built outside of scopes."""
    keras.utils.set_random_seed(1)
    made: list = []

    def parts():
        dense = keras.layers.Dense(1, activity_regularizer="l2")
        dense.build((None, 4))
        optimizer = keras.optimizers.Adam(
            0.01, clipnorm=0.1, use_ema=True, gradient_accumulation_steps=2
        )
        return dense, Errors(), optimizer

    before = parts() if early else None
    # Strategies are made in threads, too.
    thread = threading.Thread(target=lambda: made.append(make_strategy()))
    thread.start()
    thread.join()
    with made[0].scope():
        dense, errors, optimizer = before or parts()
        model = Own(dense, errors)
        model.compile(optimizer, "mse")
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [history.history, [keras.ops.convert_to_numpy(v) for v in variables]]


def one_and_then_two() -> list[list]:
    """On one device; on two, with parts made before, and with parts made in scope."""

    def one():
        return ks.OneDeviceStrategy("cpu:0")

    def two():
        return ks.MirroredStrategy(["cpu:0", "cpu:1"])

    return [trained(one, False), trained(two, True), trained(two, False)]


@pytest.mark.full(keep_on="jax")
def test_patches_are_installed_for_several_replicas(starter):
    with WorkerRunner(1, 2, timeout_seconds=300, starter=starter) as runner:
        ((one, early, late),) = runner.run(one_and_then_two)
    assert equal(one, late)
    assert equal(one, early)
