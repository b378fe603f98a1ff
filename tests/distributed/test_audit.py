"""The first step of several workers is audited on some rows of each."""

import logging

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner


class Centering(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Halving(keras.layers.Layer):
    """Keeps what it returns, as programs that add it elsewhere do."""

    def call(self, x):
        self.halved = x / 2
        return self.halved


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def fit(alone=False, mode="exact"):
    """Fit a model that compares rows, and one that does not."""
    messages = _Messages()
    logging.getLogger("keras_strategy").addHandler(messages)
    x = np.random.RandomState(0).randn(22, 4).astype("float32")
    strategy = None if alone else ks.MultiWorkerMirroredStrategy()
    result = {}
    ks.config.audit(mode)
    try:
        for layer in (Halving, Centering):
            keras.utils.set_random_seed(1)
            with keras.name_scope("model") if alone else strategy.scope():
                model = keras.Sequential(
                    [keras.Input((4,)), layer(), keras.layers.Dense(1)]
                )
                model.compile("adam", "mse")
            try:
                model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
            except RuntimeError as error:
                result[f"{layer.__name__} error"] = str(error)
            result[layer.__name__] = model.get_weights()
    finally:
        ks.config.audit("exact")
        logging.getLogger("keras_strategy").removeHandler(messages)
    result["messages"] = [m for m in messages.found if "one device's" in m]
    return result


def fit_text(alone=False):
    """Fit a model with a custom layer on strings; return its weights."""
    keras.utils.set_random_seed(1)
    strategy = None if alone else ks.MultiWorkerMirroredStrategy()
    with keras.name_scope("model") if alone else strategy.scope():
        lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
        layers = [lookup, keras.layers.Embedding(4, 2), Halving()]
        inputs = keras.Input((1,), dtype="string")
        model = keras.Sequential([inputs, *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    words = keras.ops.convert_to_tensor([["red"], ["green"], ["blue"]] * 5)
    model.fit(words, np.ones((15, 1, 1)), batch_size=6, verbose=0)
    return model.get_weights()


pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="a step is one program there"
)


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("count, devices", [(2, 1), (2, 2)])
def test_finding_is_reported_once_by_the_chief(count, devices, starter):
    with WorkerRunner(count, devices, timeout_seconds=300, starter=starter) as runner:
        exact = runner.run(fit)
        raised = runner.run(fit, mode="raise")
    alone = fit(alone=True)
    (message,) = exact[0]["messages"]
    assert "(Centering)" in message
    assert all(not result["messages"] for result in exact[1:])
    for result in exact:
        for name in ("Halving", "Centering"):
            for mine, one in zip(result[name], alone[name], strict=True):
                np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)
    assert all("(Centering)" in result["Centering error"] for result in raised)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings"
)
def test_step_with_strings_is_audited(two_workers):
    alone = fit_text(alone=True)
    for weights in two_workers.run(fit_text):
        for mine, one in zip(weights, alone, strict=True):
            np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)
