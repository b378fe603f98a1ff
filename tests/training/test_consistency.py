"""Fingerprints of `fit` on workers, and equality of the replicas' values."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training import consistency


def items(counted: int = 0, rate: float = 0.1, lambdas: bool = True, **of_adam):
    for _ in range(counted):
        keras.layers.Dense(1), keras.optimizers.Adam()
    keras.utils.set_random_seed(counted)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, activation="tanh")(inputs)
    y = keras.layers.Dense(3, dtype="float32")(x)
    x = keras.layers.add([x, keras.layers.Dropout(0.5)(y)])
    if lambdas:
        x = keras.layers.Lambda(lambda x: x + counted)(x)
    model = keras.Model(inputs, x, name=f"model-of-{counted}")
    loss = keras.losses.MeanSquaredError()
    model.compile(keras.optimizers.Adam(rate, **of_adam), loss, metrics=["mae"])
    compiled = {"loss": loss, "metrics": ["mae"]}
    arguments = {"epochs": 3, "x": np.ones((4, 4)), "y": np.array([["a"]], object)}
    stop = keras.callbacks.EarlyStopping(f"loss_{counted}")
    return consistency.fit_signature(model, compiled, arguments, [stop])


def test_equal_fits_have_equal_signatures():
    assert items() == items(counted=2, rate=0.5)
    fields = dict(items())
    assert fields["optimizer.beta_1"] == "0.9"
    assert fields["argument epochs"] == "3"
    assert not [f for f in fields if "seed" in f or "learning_rate" in f]


@pytest.mark.parametrize("other", [{"epsilon": 1e-3}, {"lambdas": False}])
def test_differing_fits_have_differing_signatures(other):
    assert items() != items(**other)


def test_signature_includes_schedule():
    schedules = keras.optimizers.schedules
    said = [items(rate=schedules.ExponentialDecay(0.1, n, 0.5)) for n in (10, 20)]
    assert said[0] != said[1]


@dataclasses.dataclass
class Ragged:
    """Data of which only the number of rows is known, as of a `tf.RaggedTensor`."""

    shape: tuple[int, None]


def test_signature_includes_ragged_rows():
    said = [consistency.call_signature({"x": Ragged((n, None))}) for n in (3, 4)]
    assert said[0] != said[1]


def test_diverging_replicas_are_reported_after_epoch():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    kernel = model.layers[0].kernel

    def spoil(epoch, logs):
        parts = strategy.experimental_local_results(kernel)
        if epoch == 1:
            parts = [keras.ops.copy(parts[0]), parts[1] + 1.0]
            strategy.extended.group.assign_components(kernel, parts)

    spoils = keras.callbacks.LambdaCallback(on_epoch_end=spoil)
    data = np.ones((4, 3)), np.ones((4, 1))
    model.fit(*data, epochs=1, callbacks=[spoils], verbose=0)
    message = "kernel' differ: replica 1 differs from replica 0"
    with pytest.raises(ks.errors.MirrorError, match=message):
        model.fit(*data, epochs=2, callbacks=[spoils], verbose=0)
