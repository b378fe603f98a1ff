"""What a step of training costs on JAX beside its arithmetic: no time, but counts."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX adapter", allow_module_level=True)

from tests.speed.figures import figures_of, python_calls

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("compiled_here")]

BATCH = 16
X = np.random.default_rng(0).normal(size=(100 * BATCH, 24)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, 100 * BATCH).astype("int32")
SCALAR = np.dtype("float32").itemsize
# The images and the labels, for two replicas.
BATCH_TRANSFERS = 2 * 2


def model():
    return keras.Sequential(
        [keras.Input((24,)), *(layers.Dense(40, "relu") for _ in range(4))]
        + [layers.Dense(5)]
    )


def loss(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def test_fit_cost_per_step(two):
    with two.scope():
        net = model()
        net.compile("adam", loss(), metrics=["accuracy"])

    def train(steps):
        rows = steps * BATCH
        net.fit(X[:rows], Y[:rows], batch_size=BATCH, verbose=0)

    # Replicas that took turns leave nothing behind.
    two.run(lambda: None, options=ks.RunOptions(compile=False))
    figures = figures_of(train, net)
    # Everything in one: the gradients, the loss and the right answers.
    assert figures.collectives == 1
    assert figures.bytes == figures.gradient_bytes + 2 * SCALAR
    assert figures.compilations == 0
    # Nobody reads the loss and the accuracy of a step.
    assert figures.transfers == BATCH_TRANSFERS
    assert figures.python_calls <= 5


def step_of(strategy):
    """A step of training, its model, and the metric that it updates."""
    with strategy.scope():
        net, adam = model(), keras.optimizers.Adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_row = loss(reduction="none")

    def step(x, y):
        def loss_of_batch():
            logits = net(x, training=True)
            return ks.compute_average_loss(per_row(y, logits)), logits

        (value, logits), gradients = ks.value_and_grad(
            loss_of_batch, net.trainable_variables, has_aux=True
        )()
        adam.apply(gradients, net.trainable_variables)
        accuracy.update_state(y, logits)
        return value

    return step, net, accuracy


def test_run_cost_per_step(two):
    """What a step costs whose program is known."""
    step, _, _ = step_of(two)
    batches = two.experimental_distribute_dataset([(X[:BATCH], Y[:BATCH])])
    (batch,) = batches

    def train(steps):
        for _ in range(steps):
            two.run(step, batch)

    train(2)
    calls = (python_calls(train, 30) - python_calls(train, 10)) / 20
    # Of 30 variables, so that none of these calls is for each of them.
    assert calls <= 32


def test_run_and_reduce_cost_per_step(two):
    step, net, accuracy = step_of(two)

    def train(steps):
        batches = [
            (X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, steps * BATCH, BATCH)
        ]
        for batch in two.experimental_distribute_dataset(batches):
            two.reduce("SUM", two.run(step, args=batch))
        float(accuracy.result())

    figures = figures_of(train, net)
    # The rows of the batch, which the loss divides by. Then in one: the gradients, the
    # loss, and what the accuracy counts.
    assert figures.collectives == 2
    assert figures.bytes == figures.gradient_bytes + (1 + 3) * SCALAR
    assert figures.compilations == 0
    assert figures.transfers == BATCH_TRANSFERS
    assert figures.python_calls <= 90
