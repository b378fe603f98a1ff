"""Costs of a step on two devices beside its arithmetic; no times."""

from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Tests of the TensorFlow adapter", allow_module_level=True)

import tensorflow as tf

import keras_strategy as ks
from keras_strategy.backends.tensorflow import compile_cache
from tests.speed import counts_tensorflow
from tests.speed.figures import figures_of

pytestmark = pytest.mark.full

BATCH = 8
X = np.random.RandomState(0).rand(64, 5).astype("float32")
Y = np.random.RandomState(1).randint(0, 3, 64)
VARIABLES = 4  # kernels and biases of the model's two layers


def small_model():
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, "relu"), keras.layers.Dense(3)]
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rows(steps):
    index = np.arange(steps * BATCH) % len(X)
    return X[index], Y[index]


def test_fit_cost_per_step(two):
    with two.scope():
        model = small_model()
        model.compile(keras.optimizers.Adam(), loss(), metrics=["accuracy"])

    def train(steps):
        model.fit(*rows(steps), batch_size=BATCH, verbose=0)

    figures = figures_of(train, model)

    # The gradients; for the logs the sum and the count of the loss and of the accuracy.
    assert figures.collectives == VARIABLES + 4
    assert figures.bytes == figures.gradient_bytes + 4 * 4
    assert figures.compilations == 0
    # To the second device its inputs, targets and weight, and the summed gradients;
    # from it its gradients, its part of the logs, and what its metrics came to.
    assert figures.transfers <= 3 + VARIABLES + VARIABLES + 4 + 2
    # Keras's loop calls a compiled function, which holds everything of ours.
    assert figures.python_calls == 0


def test_gradient_bytes_of_unknown_shapes(two):
    """As of a Dense kernel whose inputs have rank 3."""
    with two.scope():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((2, 5)), layers.Dense(3), layers.Flatten(), layers.Dense(3)]
        )
        model.compile(keras.optimizers.Adam(), loss())
    x = np.zeros((BATCH, 2, 5), "float32")
    batch = tf.data.Dataset.from_tensor_slices((x, Y[:BATCH])).batch(BATCH).cache()

    def train(steps):
        model.fit(batch.repeat(), steps_per_epoch=steps, verbose=0)

    train(1)
    _, short, *_ = counts_tensorflow.count(train, 2)
    _, long, *_ = counts_tensorflow.count(train, 3)
    gradients = sum(np.prod(v.shape) for v in model.trainable_variables)
    # The sum and the count of the loss travel, too.
    assert long - short == 4 * (gradients + 2)


@pytest.mark.parametrize("strategy", [ks.OneDeviceStrategy, ks.MirroredStrategy])
def test_one_device_step_is_keras_step(strategy):
    with strategy("cpu:0" if strategy is ks.OneDeviceStrategy else ["cpu:0"]).scope():
        model = small_model()
        model.compile(keras.optimizers.Adam(), loss(), metrics=["accuracy"])

    def train(steps):
        model.fit(*rows(steps), batch_size=BATCH, verbose=0)

    figures = figures_of(train, model)

    assert figures.python_calls == 0
    assert (figures.collectives, figures.transfers, figures.compilations) == (0, 0, 0)


@pytest.mark.parametrize("by", ["value_and_grad", "GradientTape"])
def test_custom_loop_cost_per_step(two, by):
    with two.scope():
        model, adam = small_model(), keras.optimizers.Adam()
        adam.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
    dataset = dataset.batch(BATCH, drop_remainder=True)
    batches = iter(two.experimental_distribute_dataset(dataset))

    def step(x, y):
        variables = model.trainable_variables
        if by == "GradientTape":
            with tf.GradientTape() as tape:
                value = loss()(y, model(x))
            gradients = tape.gradient(value, variables)
        else:
            value, gradients = ks.value_and_grad(
                lambda: loss()(y, model(x)), variables
            )()
        adam.apply(gradients, variables)
        return value

    def train(steps):
        for _ in range(steps):
            losses = two.run(step, args=next(batches))
            two.reduce("SUM", losses, axis=None)

    figures = figures_of(train, model)

    # The gradients, the denominator of the loss, and the loss in `reduce`.
    assert figures.collectives == VARIABLES + 2
    assert figures.bytes == figures.gradient_bytes + 2 * 4
    assert figures.compilations == 0
    # Gradients and denominator there and back, and the second device's loss.
    assert figures.transfers <= 2 * (VARIABLES + 1) + 1
    # Those of `run`, `reduce` and the iterator; none of them is for a variable.
    assert figures.python_calls <= 68


@pytest.mark.parametrize("elsewhere", [False, True])
def test_known_program_skips_tf_function(elsewhere, two, monkeypatch):
    """But in a TensorFlow that keeps what it asks instead in another place."""
    if elsewhere:
        monkeypatch.setattr(compile_cache, "make_function_context", None)
    asked = []
    kind: Any = type(tf.function(loss))
    call = kind.__call__

    def counted(self, *args, **kwargs):
        asked.append(self)
        return call(self, *args, **kwargs)

    def double(x):
        return 2.0 * x

    monkeypatch.setattr(kind, "__call__", counted)
    for step in range(4):
        (value, _) = two.experimental_local_results(
            two.run(double, (tf.constant(float(step)),))
        )
        assert float(value) == 2.0 * step

    assert len(asked) == (4 if elsewhere else 1)
