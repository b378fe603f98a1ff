"""Random numbers in `run` are one device's, for rows of a dataset."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import largest

BACKEND = keras.backend.backend()
ROWS, BATCH, FEATURES = 21, 8, 8
RNG = np.random.RandomState(3)
X = RNG.randn(ROWS, FEATURES).astype("float32")
Y = RNG.randn(ROWS, 1).astype("float32")
ONE = ks.OneDeviceStrategy("cpu:0")


def whole(strategy):
    """Batches of 8, 8 and 5 rows; of the last, four replicas get 2, 2, 1 and 0."""
    batches = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    return strategy.experimental_distribute_dataset(batches)


def of_each_replica(strategy):
    """The same rows, given to each replica by a function."""
    if strategy is ONE:
        return whole(strategy)
    bounds = [(i, min(i + 2, ROWS)) for i in range(0, ROWS, 2)]
    batches = [(X[begin:end], Y[begin:end]) for begin, end in bounds]
    return strategy.distribute_datasets_from_function(lambda context: batches)


def loop(strategy, dataset, noise=None, compiled=None, steps=None):
    """The loop of a user. Returns the weights and the losses."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dropout(0.3, seed=7),
                layers.Dense(FEATURES, "tanh"),
                layers.Dropout(0.3),
                layers.GaussianNoise(0.1, seed=2),
                layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        seeds = keras.random.SeedGenerator(5)

    def step(x, y):
        if steps is not None:
            steps.append(1)

        def loss_of_batch():
            given = x if noise is None else x + noise(x, seeds)
            errors = ops.square(model(given, training=True) - y)[:, 0]
            return ks.compute_average_loss(errors)

        loss, gradients = ks.value_and_grad(loss_of_batch, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    for batch in dataset(strategy):
        loss = strategy.run(step, args=batch, options=ks.RunOptions(compile=compiled))
        losses.append(float(strategy.reduce("SUM", loss)))
    return [*model.get_weights(), losses]


@functools.cache
def on_one_device():
    return loop(ONE, whole)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("dataset", [whole, of_each_replica])
def test_keras_layers_in_run(dataset, mirrored, caplog):
    assert largest(on_one_device(), loop(mirrored(4), dataset)) < 1e-5
    assert "random" not in caplog.text


@pytest.mark.full(keep_on="tensorflow")
def test_keras_layers_in_eager_run(mirrored):
    assert largest(on_one_device(), loop(mirrored(3), whole, compiled=False)) < 1e-5


@pytest.mark.full(keep_on="jax")
def test_direct_draws_in_run(two):
    def noise(x, seeds):
        # As long as the rows are many.
        follows = keras.random.normal((ops.shape(x)[0], 1), seed=seeds)
        return follows + keras.random.normal((4,), seed=seeds)[0]

    steps = []
    many = loop(two, whole, noise, steps=steps)
    difference = largest(loop(ONE, whole, noise), many)
    if BACKEND == "torch":
        assert difference > 1e-3
        assert len(steps) == 2 * 3
    else:
        assert difference < 1e-5


def kept(strategy, *batches, compiled=None):
    """Return the elements that Dropout keeps of eight rows of ones, by replica."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = layers.Dropout(0.5, seed=4)
    parts = strategy.run(
        lambda x, *others: layer(x, training=True),
        args=batches,
        options=ks.RunOptions(compile=compiled),
    )
    parts = strategy.experimental_local_results(parts)
    return [ops.convert_to_numpy(part).astype(bool).tolist() for part in parts]


def ones(strategy):
    batches = [np.ones((8, FEATURES), "float32")]
    return next(iter(strategy.experimental_distribute_dataset(batches)))


def test_draws_matching_one_device(two):
    (one,) = kept(ONE, ones(ONE))
    batch = ones(two)
    assert kept(two, batch) == kept(two, batch, batch) == [one[:4], one[4:]]

    def own(*batches):
        first, second = kept(two, *batches)
        return first != second and second != one[4:]

    # Of two batches nobody knows of which one the rows are; and of what `run` returned,
    # or a user put together, nobody knows whether these are rows.
    assert own(batch, ones(two))
    assert own(two.run(lambda x: x + 0, args=(batch,)))
    assert own(ks.PerReplica(two.experimental_local_results(batch)))
    ks.config.exact_random(False)
    try:
        assert own(batch)
    finally:
        ks.config.exact_random(True)
    assert kept(two, batch) == [one[:4], one[4:]]


def test_dry_run_leaves_no_state(two):
    """Neither losses, nor statistics, nor what the process draws afterwards."""

    def after(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    layers.Dense(3, activity_regularizer="l2"),
                    layers.BatchNormalization(synchronized=strategy is two),
                    layers.Dropout(0.5, seed=1),
                ]
            )

        def step(x):
            model(x, training=True)
            return len(model.losses)

        assert strategy.run(step, args=(ones(strategy),)) == 1
        return [*model.get_weights(), np.random.random()]

    assert largest(after(ONE), after(two)) < 1e-6
