"""Training loops of one's own over distributed datasets, and `fit` of one."""

import functools

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training.ownership import strategy_of_model
from tests.equality.compare import largest, scope
from tests.training.shared import SharedModels

RNG = np.random.RandomState(7)
X = RNG.randn(21, 4).astype("float32")
Y = RNG.randn(21, 1).astype("float32")
BATCH = 8


def batches(rows=21):
    """Global batches of 8 rows; of 21 rows the last batch has 5."""
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, rows, BATCH)]


def compiled():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@pytest.fixture(scope="module")
def models():
    return SharedModels(compiled, (X[:BATCH], Y[:BATCH]))


def make(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        return compiled()


def loop(strategy, dataset, epochs=2):
    """The loop of a user. Returns the weights and the losses of all batches."""
    model = make(strategy)
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss_of_batch():
            losses = keras.ops.square(y - model(x))[:, 0]
            return ks.compute_average_loss(losses)

        loss, gradients = ks.value_and_grad(loss_of_batch, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    for _ in range(epochs):
        for x, y in dataset:
            loss = strategy.run(step, args=(x, y))
            losses.append(float(strategy.reduce("SUM", loss)))
    return [*model.get_weights(), losses]


def fit(model, x, epochs=2, **arguments):
    history = model.fit(x, epochs=epochs, verbose=0, shuffle=False, **arguments).history
    return [*model.get_weights(), *history.values()]


@functools.cache
def plain_fit(epochs=2):
    """Weights and losses of Keras without a strategy."""
    return fit(make(None), X, epochs, y=Y, batch_size=BATCH)


@functools.cache
def loop_on_one_device():
    one = ks.OneDeviceStrategy("cpu:0")
    return loop(one, one.experimental_distribute_dataset(batches()))


@pytest.mark.full(keep_on="tensorflow")
def test_loop_on_one_device_equals_fit():
    *weights, losses = loop_on_one_device()
    *fitted, history = plain_fit()
    assert largest(fitted, weights) < 2e-5
    # What fit logs is the mean over the rows of an epoch.
    means = [np.average(losses[i : i + 3], weights=[8, 8, 5]) for i in (0, 3)]
    np.testing.assert_allclose(history, means, atol=1e-5)


@pytest.mark.full(keep_on="jax")
def test_loop_equals_one_device(mirrored):
    """The last batch has 5 rows: 2 + 2 + 1 + 0."""
    strategy = mirrored(4)
    dataset = strategy.experimental_distribute_dataset(batches())
    assert largest(loop_on_one_device(), loop(strategy, dataset)) < 2e-5


@pytest.mark.full(keep_on="jax")
def test_loop_over_per_replica_batches(two):
    """Batches of 4 rows for each replica, the last of the first one alone."""

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(BATCH)
        rows = 20
        return [(X[i : i + size], Y[i : i + size]) for i in range(0, rows, size)]

    one = ks.OneDeviceStrategy("cpu:0")
    data = [(X[i:end], Y[i:end]) for i, end in ((0, 8), (8, 16), (16, 20))]
    whole = one.experimental_distribute_dataset(data)
    expected = loop(one, whole, epochs=1)
    dataset = two.distribute_datasets_from_function(dataset_fn)
    assert largest(expected, loop(two, dataset, 1)) < 2e-5


def test_loop_over_global_batches(two):
    """As before, with the same rows on every replica."""
    one = ks.OneDeviceStrategy("cpu:0")
    run = [
        loop(strategy, strategy.experimental_distribute_dataset(batches(16)), 1)
        for strategy in (one, two)
    ]
    assert largest(*run) < 2e-5


# --- fit of what is distributed already


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return batches()[index]


def distributed(strategy, kind):
    if kind == "list":
        return strategy.experimental_distribute_dataset(batches())
    if kind == "py_dataset":
        return strategy.experimental_distribute_dataset(Batches())
    if kind == "tf":
        tf = pytest.importorskip("tensorflow")
        source = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        return strategy.experimental_distribute_dataset(source)
    parts = [
        (part_x, part_y)
        for x, y in batches()
        for part_x, part_y in ((x[:4], y[:4]), (x[4:], y[4:]))
    ]
    return strategy.distribute_datasets_from_function(lambda _: parts)


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("kind", ["list", "py_dataset", "tf", "function"])
def test_fit(kind, two, models):
    model = models.fresh(two)
    dataset = distributed(strategy_of_model(model), kind)
    assert largest(plain_fit(), fit(model, dataset)) < 2e-5


@pytest.mark.full(keep_on="torch")
def test_validation_evaluate_and_predict(two, models):
    model, plain = models.fresh(two), make(None)
    dataset = distributed(strategy_of_model(model), "list")
    loss = plain.evaluate(X, Y, batch_size=BATCH, verbose=0)
    rows = plain.predict(X, verbose=0)
    assert abs(loss - model.evaluate(dataset, verbose=0)) < 1e-5
    found = model.predict(dataset, verbose=0)
    assert found.shape == (21, 1) and largest([rows], [found]) < 1e-5
    model.optimizer.learning_rate = 0.0
    history = model.fit(dataset, validation_data=dataset, verbose=0).history
    assert abs(history["val_loss"][0] - loss) < 1e-5


def test_fit_of_generator(two, models):
    model = models.fresh(two)
    strategy = strategy_of_model(model)
    dataset = strategy.experimental_distribute_dataset(batch for batch in batches())
    assert largest(plain_fit(1), fit(model, dataset, epochs=1)) < 2e-5


def test_fit_with_one_replica():
    one = ks.OneDeviceStrategy("cpu:0")
    dataset = one.experimental_distribute_dataset(batches())
    assert largest(plain_fit(1), fit(make(one), dataset, epochs=1)) < 2e-5
    dataset = ks.get_strategy().experimental_distribute_dataset(batches())
    assert largest(plain_fit(1), fit(make(None), dataset, epochs=1)) < 2e-5


def test_fit_of_foreign_distributed_dataset(mirrored):
    dataset = mirrored(3).experimental_distribute_dataset(batches())
    with pytest.raises(ValueError, match=r"`fit` received a dataset that Mirrored"):
        make(mirrored(2)).fit(dataset, verbose=0)
    with pytest.raises(ValueError, match="belongs to 'no strategy'"):
        make(None).fit(dataset, verbose=0)
