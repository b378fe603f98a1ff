"""Training loops of one's own over distributed datasets, and `fit` of one."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing.equality.compare import largest, scope

RNG = np.random.RandomState(7)
X = RNG.randn(21, 4).astype("float32")
Y = RNG.randn(21, 1).astype("float32")
BATCH = 8


def batches(rows=21):
    """Global batches of 8 rows; of 21 rows the last batch has 5."""
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, rows, BATCH)]


def make(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def loop(strategy, dataset, epochs=2, sizes=(8, 8, 5)):
    """The loop of a user. Returns the weights and the losses of all batches."""
    model = make(strategy)
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def step(x, y, size):
        def loss_of_batch():
            losses = keras.ops.square(y - model(x))[:, 0]
            return ks.compute_average_loss(losses, global_batch_size=size)

        loss, gradients = ks.value_and_grad(loss_of_batch, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    for _ in range(epochs):
        for (x, y), size in zip(dataset, sizes, strict=True):
            loss = strategy.run(step, args=(x, y, np.float32(size)))
            losses.append(float(strategy.reduce("SUM", loss)))
    return [*model.get_weights(), losses]


def fit(strategy, x, epochs=2, **arguments):
    model = make(strategy)
    history = model.fit(x, epochs=epochs, verbose=0, shuffle=False, **arguments).history
    return [*model.get_weights(), *history.values()]


def test_a_loop_over_whole_batches_is_the_same_on_one_device(two):
    one = ks.OneDeviceStrategy("cpu:0")
    run = [
        loop(strategy, strategy.experimental_distribute_dataset(batches(16)), 2, (8, 8))
        for strategy in (one, two)
    ]
    assert largest(*run) < 2e-5


def test_a_loop_is_the_same_on_one_device_and_as_fit(replicas, mirrored):
    """The last batch has 5 rows: 3 + 2, 2 + 2 + 1, or 2 + 2 + 1 + 0."""
    one, many = ks.OneDeviceStrategy("cpu:0"), mirrored(replicas)
    run = [
        loop(strategy, strategy.experimental_distribute_dataset(batches()))
        for strategy in (one, many)
    ]
    assert largest(*run) < 2e-5
    *weights, losses = run[1]
    fitted = fit(None, X, y=Y, batch_size=BATCH)
    assert largest(fitted[: len(weights)], weights) < 2e-5
    # What fit logs is the mean over the rows of an epoch.
    sizes = [8, 8, 5]
    epochs = [
        np.average(losses[:3], weights=sizes),
        np.average(losses[3:], weights=sizes),
    ]
    np.testing.assert_allclose(fitted[-1], epochs, atol=1e-5)


def test_a_loop_over_batches_of_each_replica(two):
    """Batches of 4 rows for each replica, the last of the first one alone."""

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(BATCH)
        rows = 20
        return [(X[i : i + size], Y[i : i + size]) for i in range(0, rows, size)]

    one = ks.OneDeviceStrategy("cpu:0")
    data = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in (0, 8)]
    data.append((X[16:20], Y[16:20]))
    sizes = (8, 8, 4)
    expected = loop(one, one.experimental_distribute_dataset(data), sizes=sizes)
    dataset = two.distribute_datasets_from_function(dataset_fn)
    assert largest(expected, loop(two, dataset, sizes=sizes)) < 2e-5


# --- fit of what is distributed already


@pytest.mark.parametrize("kind", ["list", "py_dataset", "tf", "function"])
def test_fit_evaluate_and_predict(kind, two):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return batches()[index]

    if kind == "list":
        dataset = two.experimental_distribute_dataset(batches())
    elif kind == "py_dataset":
        dataset = two.experimental_distribute_dataset(Batches())
    elif kind == "tf":
        tf = pytest.importorskip("tensorflow")
        source = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        dataset = two.experimental_distribute_dataset(source)
    else:
        parts = [
            (part_x, part_y)
            for x, y in batches()
            for part_x, part_y in ((x[:4], y[:4]), (x[4:], y[4:]))
        ]
        dataset = two.distribute_datasets_from_function(lambda _: parts)

    validation = {"validation_data": (X, Y), "validation_batch_size": BATCH}
    expected = fit(None, X, y=Y, batch_size=BATCH, **validation)
    assert largest(expected, fit(two, dataset, validation_data=dataset)) < 2e-5
    model, plain = make(two), make(None)
    rows = model.predict(dataset, verbose=0)
    assert rows.shape == (21, 1)
    assert largest([plain.predict(X, verbose=0)], [rows]) < 1e-5
    loss = plain.evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert abs(loss - model.evaluate(dataset, verbose=0)) < 1e-5


def test_fit_of_a_generator(two):
    dataset = two.experimental_distribute_dataset(batch for batch in batches())
    expected = fit(None, X, y=Y, batch_size=BATCH, epochs=1)
    assert largest(expected, fit(two, dataset, epochs=1)) < 2e-5


def test_fit_with_one_replica():
    one = ks.OneDeviceStrategy("cpu:0")
    expected = fit(None, X, y=Y, batch_size=BATCH)
    dataset = one.experimental_distribute_dataset(batches())
    assert largest(expected, fit(one, dataset)) < 2e-5
    dataset = ks.get_strategy().experimental_distribute_dataset(batches())
    assert largest(expected, fit(None, dataset)) < 2e-5


def test_fit_of_what_another_strategy_distributed(mirrored):
    dataset = mirrored(3).experimental_distribute_dataset(batches())
    with pytest.raises(ValueError, match=r"`fit` was given a dataset that Mirrored"):
        make(mirrored(2)).fit(dataset, verbose=0)
    with pytest.raises(ValueError, match="belongs to 'no strategy'"):
        make(None).fit(dataset, verbose=0)
