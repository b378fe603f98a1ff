"""The random numbers of one device, on any number of replicas."""

import logging
import random

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from tests.equality import models
from tests.equality.compare import assert_equal, scope, train

BACKEND = keras.backend.backend()
FEATURES = 8
# By batches of 16 each of two replicas gets 8 rows: as many as features, and as
# members of what belongs to no row. The last batch has 5.
ROWS = 21


def data(rows=ROWS):
    rng = np.random.RandomState(0)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    return x, rng.normal(size=(rows, 1)).astype("float32")


def compiled(*middle, **compile):
    model = keras.Sequential(
        [keras.Input((FEATURES,)), *middle, layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", **compile)
    return model


# On one device, where to compile takes longer than to train.
EAGERLY = BACKEND == "tensorflow"


def fitted(strategy, make, rows=ROWS, **fit):
    eagerly = strategy is None and EAGERLY
    return train(strategy, make, *data(rows), 16, eagerly=eagerly, predicted=0, **fit)


def assert_one_devices(strategy, make, **fit):
    many = fitted(strategy, make, **fit)
    assert_equal(fitted(None, make, **fit), many)
    return many


@pytest.fixture
def off():
    ks.config.exact_random(False)
    yield
    ks.config.exact_random(True)


class Draws(layers.Layer):
    """Multiplies its inputs by what a function draws for them in training."""

    def __init__(self, draw, seed=3):
        super().__init__()
        self.draw = draw
        self.seeds = keras.random.SeedGenerator(seed)

    def call(self, x, training=False):
        return x * ops.cast(self.draw(x, self.seeds), x.dtype) if training else x


def every_function(x, seeds):
    """Rows first, rows last, and no rows at all, though all are 8 many."""
    rows = ops.shape(x)[0]
    random = keras.random
    return sum(
        ops.cast(numbers, "float32")
        for numbers in (
            random.normal((rows, 1), seed=seeds),
            random.uniform((rows, 1), seed=5),
            random.truncated_normal((rows, FEATURES), seed=seeds),
            ops.transpose(random.uniform((FEATURES, rows), seed=seeds)),
            random.normal((FEATURES,), seed=seeds),
            random.randint((rows, 1), 0, 5, seed=seeds),
            random.gamma((rows, 1), 2.0, seed=seeds),
            random.beta((rows, 1), 2.0, ops.abs(x[:, :1]) + 1.0, seed=seeds),
            random.binomial((rows, 1), 5.0, 0.5, seed=seeds),
            random.categorical(x, 1, seed=seeds),
            random.shuffle(x, axis=1, seed=seeds),
        )
    )


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.needs_patch(
    "keras.random.normal",
    "keras.random.uniform",
    "keras.random.randint",
    "keras.random.gamma",
    "keras.random.beta",
    "keras.random.binomial",
    "keras.random.categorical",
    "keras.random.shuffle",
    backend="torch",
)
@pytest.mark.needs_patch("keras.random.truncated_normal", backend="tensorflow")
def test_every_random_function(two):
    assert_one_devices(two, lambda: compiled(Draws(every_function)))


def functions_of_shapes(x, seeds):
    """On TensorFlow these shapes are no sequences."""
    random, shape = keras.random, seeds.state.shape
    return sum(
        ops.mean(ops.cast(numbers, "float32"))
        for numbers in (
            random.normal(shape, seed=seeds),
            random.normal(x.shape[1:], seed=seeds),
            random.uniform(shape, seed=5),
            random.truncated_normal(shape, seed=seeds),
            random.randint(shape, 0, 5, seed=seeds),
            random.gamma(shape, 2.0, seed=seeds),
            random.beta(shape, 2.0, 3.0, seed=seeds),
            random.binomial(shape, 5.0, 0.5, seed=seeds),
        )
    )


@pytest.mark.full(keep_on="torch")
def test_shape_of_tensor_or_variable_is_drawn(two):
    assert_one_devices(two, lambda: compiled(Draws(functions_of_shapes)))


@pytest.mark.full(keep_on="jax")
@pytest.mark.needs_patch("keras.random.dropout", backend="torch")
def test_keras_layers(mirrored, caplog):
    """On three replicas, of which one has no more than a row of the last batch."""

    def make():
        return compiled(
            # Its loss was added before anything is drawn.
            layers.Dense(FEATURES, activity_regularizer="l2"),
            layers.Dropout(0.3, seed=7),
            layers.Dropout(0.3),
            layers.Reshape((4, 2)),
            layers.TimeDistributed(
                keras.Sequential([layers.Dense(2), layers.GaussianNoise(0.1, seed=2)])
            ),
            layers.SpatialDropout1D(0.3),
            layers.Flatten(),
            layers.AlphaDropout(0.2, noise_shape=(None, 1), seed=7),
        )

    assert_one_devices(mirrored(3), make)
    assert "random" not in caplog.text


class StepsFirst(layers.Layer):
    """Gives steps that lie in memory before the rows, as recurrent layers do."""

    def call(self, x):
        return ops.transpose(ops.stack([x, x + 1], axis=0), (1, 0, 2))


@pytest.mark.full(keep=1, keep_on="torch")
def test_one_row_per_replica(two):
    """A tensor of one row does not show how one device's lies in memory."""

    def make():
        return compiled(StepsFirst(), layers.Dropout(0.4), layers.Flatten())

    many = fitted(two, make, 18)
    assert_equal(fitted(None, make, 18), many)


@pytest.mark.full(keep=1, keep_on="torch")
def test_python_control_flow(two):
    """One device and replicas go on alike in Python's `random`, too."""
    if BACKEND == "jax":
        pytest.skip("one program chooses once")
    trained, ends = [], []
    for strategy in (None, two):

        def make():
            images = layers.Reshape((4, 2, 1)), layers.Concatenate()
            inputs = keras.Input((FEATURES,))
            x = images[1]([images[0](inputs)] * 3)
            x = layers.AugMix((-3, 3), num_chains=2, chain_depth=2)(x)
            model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
            model.compile(keras.optimizers.SGD(0.01), "mse")
            return model

        trained.append(train(strategy, make, *data(), 16, predicted=0))
        ends.append(random.random())
    assert_equal(*trained)
    assert ends[0] == ends[1]


@pytest.mark.full(keep=1)
def test_static_batch_sizes(two):
    """As those of a dataset that drops what is left over are, on TensorFlow."""
    x, y = data()
    losses = []
    for strategy in (None, two):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = compiled(layers.Dropout(0.4, seed=3))
        losses.append([model.train_on_batch(x[:16], y[:16]) for _ in range(3)])
        if BACKEND == "tensorflow":
            import tensorflow as tf

            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, True)
            losses[-1] += model.fit(batches, verbose=0).history["loss"]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_without_seed(two):
    def unseeded(x, seeds):
        return keras.random.uniform(ops.shape(x))

    if BACKEND == "jax":
        pytest.skip("Keras takes no unseeded numbers in a compiled step there")
    assert_one_devices(two, lambda: compiled(Draws(unseeded)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the others have no such seed")
def test_unseeded_process_stays_unseeded(two):
    """With one, arrays would be shuffled alike in each epoch of what comes later."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    tf.random.set_seed(None)
    with two.scope():
        model = compiled(Draws(lambda x, seeds: 1.0), run_eagerly=True)
    x, y = data(8)
    model.fit(x, y, batch_size=8, verbose=0)
    assert context.global_seed() is None


@pytest.mark.full(keep_on="torch")
def test_draws_before_concatenation(two, caplog):
    def joined(x, seeds):
        entries = ops.reshape(x, (-1,))
        return ops.reshape(
            keras.random.uniform(ops.shape(entries), seed=seeds), (-1, 8)
        )

    assert_one_devices(two, lambda: compiled(Draws(joined)))
    assert ("8 random numbers or more" in caplog.text) == (BACKEND != "jax")


def test_unknown_batch_dimension_warns(two, caplog):
    def of_pairs(x, seeds):
        rows = ops.shape(x)[0]
        return ops.sum(keras.random.uniform((rows, rows), seed=seeds)) * 0 + 1

    fitted(two, lambda: compiled(Draws(of_pairs)))
    told = [r for r in caplog.records if "could not be determined" in r.getMessage()]
    assert bool(told) == (BACKEND != "jax")
    messages = [record.getMessage() for record in told]
    # Keras 3.16 traces the layer on TensorFlow with known and with unknown sizes.
    assert len(set(messages)) == len(messages) <= 2
    assert all("layer 'draws" in message for message in messages)


def test_shuffled_rows_of_split_step_warn(two, caplog, audit_mode):
    def shuffled(x, seeds):
        return keras.random.shuffle(x, seed=seeds)

    audit_mode("warn")
    fitted(two, lambda: compiled(Draws(shuffled)))
    assert ("shuffles the rows" in caplog.text) == (BACKEND != "jax")


class OwnStep(keras.Model):
    """Draws in its step, before and after it asks for gradients."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(1)
        self.seeds = keras.random.SeedGenerator(5)
        self.steps = 0

    def build(self, shape):
        self.body.build(shape)

    def call(self, x):
        return self.body(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        self.steps += 1
        noise = keras.random.normal((ops.shape(x)[0], 1), seed=self.seeds)
        return ops.mean(ops.square(y - y_pred + noise))


@pytest.mark.full(keep_on="jax")
def test_drawing_loss_and_dry_run_state(two):
    def make():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    one, after_one = fitted(None, make, shuffle=False), np.random.random()
    many, after_many = fitted(two, make, shuffle=False), np.random.random()
    assert_equal(one, many)
    assert after_one == after_many
    if BACKEND == "torch":
        assert many.model.steps == one.model.steps


class Always(layers.Dropout):
    """Monte Carlo dropout."""

    def call(self, inputs, training=False):
        return super().call(inputs, training=True)


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("seed", [3, None] if BACKEND == "torch" else [3])
def test_evaluate_and_predict(seed, two):
    """Of a model that draws there, and that was not trained before."""
    found = []
    for strategy in (None, two):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = compiled(Always(0.4, seed=seed))
        model.run_eagerly = strategy is None and EAGERLY
        x, y = data()
        found.append(
            [
                model.predict(x, batch_size=16, verbose=0),
                model.predict(x, batch_size=16, verbose=0),
                model.evaluate(x, y, batch_size=16, verbose=0),
            ]
        )
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0][0] - found[0][1]).max() > 1e-3, "it drew nothing"


def test_per_replica_random_numbers(two, off):
    def make():
        return compiled(layers.Dropout(0.4, seed=3))

    def difference(a, b):
        pairs = zip(a.weights, b.weights, strict=True)
        return max(np.abs(x - y).max() for x, y in pairs)

    many = fitted(two, make)
    assert difference(many, fitted(two, make)) < 1e-6
    assert (difference(many, fitted(None, make)) > 1e-3) == (BACKEND != "jax")


def test_bad_switch_is_refused():
    with pytest.raises(TypeError, match="enabled='yes'"):
        ks.config.exact_random("yes")


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.WARNING, "keras_strategy")


class OfATable(keras.layers.Layer):
    """Drops entries of a weight, which are the same for all rows."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)  # unseeded

    def build(self, shape):
        self.table = self.add_weight(shape=(24, shape[-1]), name="table")

    def call(self, x, training=False):
        table = self.dropout(self.table, training=training)
        return x + keras.ops.sum(table, axis=0)


def test_dropout_of_a_weight_equals_one_device(mirrored):
    def make():
        out = keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((4,)), OfATable(), out])
        model.compile("sgd", "mse")
        return model

    x, y = models.regression(17)
    one = train(None, make, x, y, predicted=0)
    assert_equal(one, train(mirrored(2), make, x, y, predicted=0))
