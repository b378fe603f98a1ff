"""How often replicas speak to each other for the statistics of a global batch."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.speed.counts import count_operations

pytestmark = pytest.mark.full

NORMALIZATIONS = 3


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,))])
        for _ in range(NORMALIZATIONS):
            model.add(layers.Dense(5, "tanh"))
            model.add(layers.BatchNormalization())
        # Both need no statistics.
        model.add(layers.BatchNormalization(trainable=False))
        model.compile("sgd", "mse")
    return model


X = np.random.RandomState(0).rand(64, 5).astype("float32")


def collectives_per_step(train):
    train(4)
    short, long = (count_operations(train, steps)[0] for steps in (2, 4))
    return (long - short) / 2


@pytest.mark.usefixtures("compiled_here")
def test_one_collective_per_layer_and_pass():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics="global")
    model = make_model(strategy)
    (batch,) = strategy.experimental_distribute_dataset([X[:8]])

    def forward(x):
        return ops.sum(ops.square(model(x, training=True)))

    def both(x):
        return ks.value_and_grad(forward, model.trainable_variables)(x)[1]

    for step, passes in ((forward, 1), (both, 2)):

        def train(steps, step=step):
            for _ in range(steps):
                result = strategy.run(step, args=(batch,))
            # Not done before it was waited for.
            for value in strategy.experimental_local_results(result):
                keras.tree.map_structure(ops.convert_to_numpy, value)

        assert collectives_per_step(train) == passes * NORMALIZATIONS


def fit_collectives(strategy, method="fit"):
    model = make_model(strategy)
    call = getattr(model, method)

    def train(steps):
        call(X[: 8 * steps], X[: 8 * steps], batch_size=8, verbose=0)

    return collectives_per_step(train)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="fit is one program")
@pytest.mark.usefixtures("compiled_here")
def test_fit_adds_one_collective_per_layer_and_pass():
    exact, local = (
        fit_collectives(
            ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics=choice)
        )
        for choice in (None, "local")
    )
    assert exact - local == 2 * NORMALIZATIONS


def workers_collectives() -> list[float]:
    return [
        fit_collectives(ks.MultiWorkerMirroredStrategy(batch_statistics=choice))
        for choice in (None, "local")
    ]


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="fit is one program")
def test_fit_of_workers_adds_one_collective_per_layer_and_pass(starter):
    """The workers' comparison of what they send is part of it."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for exact, local in runner.run(workers_collectives):
            assert exact - local == 2 * NORMALIZATIONS
