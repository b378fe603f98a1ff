"""What replicas do not share by nature: random numbers, and their own statistics."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.equality.compare import largest, scope

X = np.random.RandomState(7).randn(21, 4).astype("float32")
Y = np.random.RandomState(8).randn(21, 1).astype("float32")
JAX = keras.backend.backend() == "jax"

RANDOM = {
    "Dropout": lambda: keras.layers.Dropout(0.5),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(0.5),
    "SpatialDropout": lambda: keras.layers.SpatialDropout1D(0.5),
    "RandomFlip": lambda: keras.layers.RandomFlip(),
}


def fitted(strategy):
    """A model that draws with each of them, after a training."""
    keras.utils.set_random_seed(1)
    shapes = {"RandomFlip": (2, 2, 1)}
    with scope(strategy):
        model = keras.Sequential([keras.Input((4,))])
        for name, make in RANDOM.items():
            model.add(keras.layers.Reshape(shapes.get(name, (4, 1))))
            model.add(make())
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    return model


@pytest.mark.full(keep=1, keep_on="jax")
def test_random_layers_are_reproducible_with_one_devices_seeds(mirrored):
    strategy = mirrored(3)
    first, second, one = fitted(strategy), fitted(strategy), fitted(None)
    assert largest(first.get_weights(), second.get_weights()) == 0
    states, expected = (
        [v for v in model.non_trainable_variables if "seed" in v.name]
        for model in (first, one)
    )
    assert len(states) == len(RANDOM)
    for state, seed in zip(states, expected, strict=True):
        for component in strategy.experimental_local_results(state):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(component),
                keras.ops.convert_to_numpy(seed.value),
            )


@pytest.mark.needs_patch("SeedGenerator.next", backend="torch")
@pytest.mark.parametrize("name", ["Dropout", "GaussianNoise"])
def test_replicas_draw_different_numbers(name, two):
    with two.scope():
        layer = RANDOM[name]()
    ones = np.ones((1, 64), "float32")
    drawn = two.run(lambda: layer(keras.ops.convert_to_tensor(ones), training=True))
    first, second = map(
        keras.ops.convert_to_numpy, two.experimental_local_results(drawn)
    )
    assert not np.array_equal(first, second)


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("name", ["gamma", "beta", "binomial"])
def test_distributions_are_reproducible(name, two):
    parameters = (5.0,) if name == "gamma" else (5.0, 0.5)

    def draws():
        generator = keras.random.SeedGenerator(3)
        draw = getattr(keras.random, name)
        drawn = two.run(lambda: draw((64,), *parameters, seed=generator))
        return [
            keras.ops.convert_to_numpy(part)
            for part in two.experimental_local_results(drawn)
        ]

    with two.scope():
        (first, second), again = draws(), draws()
    np.testing.assert_array_equal([first, second], again)
    assert not np.array_equal(first, second)


def test_local_batch_normalization_statistics():
    """The row-weighted mean of the replicas'; on JAX fit is one program."""
    rows = 9  # 3, 3, 3 and no rows
    devices = [f"cpu:{i}" for i in range(4)]
    strategy = ks.MirroredStrategy(devices, batch_statistics="local")
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.train_on_batch(X[:rows], Y[:rows])
    shards = [X[:rows]] if JAX else [X[0:3], X[3:6], X[6:9]]
    weights = [len(shard) / rows for shard in shards]
    mean = sum(w * s.mean(0) for w, s in zip(weights, shards, strict=True))
    variance = sum(w * s.var(0) for w, s in zip(weights, shards, strict=True))
    for variable, expected in [
        (layer.moving_mean, mean),
        (layer.moving_variance, variance),
    ]:
        for component in strategy.experimental_local_results(variable):
            np.testing.assert_allclose(
                keras.ops.convert_to_numpy(component), expected, atol=1e-5
            )


def test_batch_statistics_are_saved(two, tmp_path):
    def make():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    with two.scope():
        model = make()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = make()
    plain.load_weights(tmp_path / "model.weights.h5")
    for saved, variable in zip(plain.variables, model.variables, strict=True):
        for component in two.experimental_local_results(variable):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(component), saved.numpy()
            )


class OwnLogs(keras.Model):
    """Steps that return a tensor of their own beside the metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def test_step(self, *args):
        return self._with_logs(super().test_step(*args), args[-1])

    def train_step(self, *args):
        return self._with_logs(super().train_step(*args), args[-1])

    def _with_logs(self, result, data):
        # On JAX a step takes and returns the state too.
        logs = result[0] if JAX else result
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        logs = {**logs, "mean of x": keras.ops.mean(x)}
        return (logs, result[1]) if JAX else logs


@pytest.mark.full(keep_on="torch")
def test_custom_logs_are_row_weighted(mirrored):
    def logs(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = OwnLogs()
            model.compile("sgd", "mse", metrics=["mae"])
        for rows in (7, 8, 1):
            model.reset_metrics()
            yield model.train_on_batch(X[:rows], Y[:rows], return_dict=True)
            yield model.test_on_batch(X[:rows], Y[:rows], return_dict=True)

    for one, many in zip(logs(None), logs(mirrored(3)), strict=True):
        assert one.keys() == many.keys() == {"loss", "mae", "mean of x"}
        assert largest(list(one.values()), list(many.values())) < 1e-6


class OwnLoss(keras.Model):
    """A step that returns its loss and leaves Keras's tracker of it alone."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def test_step(self, *args):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
        if JAX:
            trainable, non_trainable, metrics = args[0]
            predicted, _ = self.stateless_call(trainable, non_trainable, x)
            return {"loss": keras.ops.mean((predicted - y) ** 2)}, args[0]
        return {"loss": keras.ops.mean((self(x) - y) ** 2)}


def test_untracked_loss(mirrored):
    def logged(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = OwnLoss()
            model.compile("sgd", "mse")
        return model.test_on_batch(X[:7], Y[:7], return_dict=True)

    one, many = logged(None), logged(mirrored(3))
    assert one["loss"] > 0
    assert largest([one["loss"]], [many["loss"]]) < 1e-6


@pytest.mark.needs_patch("Mean.update_state", backend="torch")
def test_number_as_metric(mirrored, audit_mode):
    audit_mode("off")  # which would run the step whole

    def logged(strategy):
        metrics = [lambda y, predicted: 3.0, lambda y, predicted: keras.ops.mean(y)]
        with scope(strategy):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=metrics)
        return model.test_on_batch(X[:7], Y[:7])[1:]

    one, many = logged(None), logged(mirrored(3))
    assert one[0] == many[0] == 3.0
    assert largest(one, many) < 1e-6
