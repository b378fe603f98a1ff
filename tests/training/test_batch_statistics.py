"""The rows by which BatchNormalization normalizes in training."""

import json
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance import models
from conformance.compare import (
    assert_equal,
    largest,
    replicas_apart,
    scope,
    train,
)
from tests.training.shared import alone, logged

RANDOM = np.random.RandomState(0)
# By batches of 8: of the 9 rows in the last ones, or of the last row, replicas get
# unequal parts and none.
ROWS = {2: 21, 3: 17}
IMAGES = RANDOM.normal(2.0, 3.0, (21, 6, 6, 2)).astype("float32")
X = RANDOM.normal(size=(21, 4)).astype("float32")
Y = RANDOM.normal(size=(21, 1)).astype("float32")


@pytest.fixture
def of_all():
    def make(replicas, batch_statistics="global"):
        devices = [f"cpu:{i}" for i in range(replicas)]
        return ks.MirroredStrategy(devices, batch_statistics=batch_statistics)

    return make


def compiled(model, **compile):
    # Adam would scale up the rounding noise in the gradient of what a normalization
    # takes away.
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **compile)
    return model


def of(*middle, shape=(4,)):
    return compiled(keras.Sequential([keras.Input(shape), *middle, layers.Dense(1)]))


def equal(strategy, make, x, y, **fit):
    rows = ROWS[strategy.num_replicas_in_sync]
    x, y = x[:rows], y[:rows]
    fit["predicted"] = 8  # one batch: more shapes are more programs
    one, many = alone(make, x, y, **fit), train(strategy, make, x, y, **fit)
    # A prediction adds up the differences of all weights.
    assert_equal(one, many, predictions=5e-5)
    return one


def cnn():
    """Two branches of their own, a frozen layer, channels first, and one wrapped."""
    inputs = keras.Input(IMAGES.shape[1:])
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = layers.Activation("tanh")(layers.BatchNormalization(momentum=0.5)(x))
    frozen = layers.BatchNormalization(trainable=False)
    branches = [
        layers.BatchNormalization(axis=1, scale=False)(layers.Conv2D(3, 3)(x)),
        layers.BatchNormalization(center=False)(layers.SeparableConv2D(3, 3)(x)),
        frozen(layers.SpectralNormalization(layers.Conv2D(3, 3))(x)),
    ]
    x = layers.Concatenate()(branches)
    return compiled(
        keras.Model(
            inputs, layers.Dense(1)(layers.Flatten()(layers.Activation("tanh")(x)))
        )
    )


class Clipped(layers.BatchNormalization):
    """A normalization of somebody's own."""

    def call(self, inputs, training=None, mask=None):
        return ops.tanh(super().call(inputs, training=training, mask=mask))


class Own(keras.Model):
    """A model that calls its layers itself, one of them twice."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, use_bias=False)
        self.own, self.renorm = Clipped(), layers.BatchNormalization(**models.RENORM)
        self.output_ = layers.Dense(1)

    def call(self, x, training=False):
        for _ in range(2):
            x = self.own(self.dense(x), training=training)
        return self.output_(self.renorm(x, training=training))


@pytest.mark.full(keep_on="jax")
def test_cnn_equals_one_device(mirrored, of_all):
    """By default, with an uneven last batch; local statistics differ."""
    one = equal(mirrored(3), cnn, IMAGES, Y)
    rows = ROWS[3]
    local = train(of_all(3, "local"), cnn, IMAGES[:rows], Y[:rows], predicted=0)
    differs = largest(one.weights, local.weights) > 1e-3
    # On JAX `fit` is one program of all rows.
    assert differs == (keras.backend.backend() != "jax")
    assert local.apart == 0


@pytest.mark.full(keep_on="torch")
def test_custom_model_equals_one_device(mirrored):
    equal(mirrored(3), lambda: compiled(Own()), X, Y)


@pytest.mark.full(keep_on="jax")
def test_masked_statistics_equal_one_device(mirrored):
    def make():
        normalize = layers.BatchNormalization
        inner = keras.Sequential([layers.Dense(3), normalize()])
        return compiled(
            models.masked_steps(
                normalize, lambda: layers.TimeDistributed(inner), steps=3
            )
        )

    x, y = models.steps(21)
    equal(mirrored(3), make, x[:, :3], y[:, :3])


def test_small_variance_is_stable(of_all):
    """Float32 has 7 digits: none would be left of a difference of squares."""
    strategy = of_all(2)
    far = X + 1e3
    with strategy.scope():
        layer = layers.BatchNormalization(momentum=0.0)
        layer.build(X.shape)
    rows = strategy.experimental_distribute_dataset([far])
    for batch in rows:
        strategy.run(lambda x: layer(x, training=True), args=(batch,))
    np.testing.assert_allclose(
        layer.moving_variance.numpy(), far.astype("float64").var(0), rtol=1e-4
    )


@pytest.mark.full(keep_on="torch")
def test_random_layers_after_normalization(of_all, two, caplog):
    """One replica makes a dry run of a step for them, without the others."""

    def make(**kwargs):
        layer = layers.BatchNormalization(**kwargs)
        return of(layers.Dense(4), layer, layers.Dropout(0.4, seed=3))

    one = alone(make, X, Y)
    assert_equal(one, train(two, make, X, Y))
    local = of_all(2, "local")  # which the layer overrides
    assert_equal(one, train(local, lambda: make(synchronized=True), X, Y))
    assert "random" not in caplog.text


@pytest.mark.full(keep_on="jax")
def test_train_on_batch_and_run(of_all):
    """One row after another number of them; in `run` all rows count alike."""
    results = []
    for strategy in (None, of_all(2)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = of(layers.Dense(4), layers.BatchNormalization(momentum=0.5))
            model.optimizer.build(model.trainable_variables)
        for rows in (7, 1):
            model.train_on_batch(X[:rows], Y[:rows])
        batches = [(X[i:j], Y[i:j]) for i, j in ((0, 7), (7, 8))]

        def step(x, y, model=model):
            def loss():
                errors = ops.square(model(x, training=True) - y)
                return ks.compute_average_loss(errors[:, 0])

            value, gradients = ks.value_and_grad(loss, model.trainable_variables)()
            model.optimizer.apply(gradients, model.trainable_variables)

        if strategy is None:
            for x, y in batches:
                step(*map(ops.convert_to_tensor, (x, y)))
        else:
            for batch in strategy.experimental_distribute_dataset(batches):
                strategy.run(step, args=batch)
        assert replicas_apart(strategy, model) == 0
        results.append(model.get_weights())
    assert largest(*results) < 2e-5


@pytest.mark.parametrize("compiled", [True, False])
def test_run_averages_local_statistics(two, compiled, caplog):
    """Each replica normalizes with its rows; the moving statistics are their means."""
    with two.scope():
        layer = layers.BatchNormalization(momentum=0.0)
        layer.build(X.shape)
    options = ks.RunOptions(compile=compiled)
    for batch in two.experimental_distribute_dataset([X[:7], X[:5]]):
        two.run(lambda x: layer(x, training=True), args=(batch,), options=options)
    halves = X[:3], X[3:5]
    for variable, statistic in (
        (layer.moving_mean, np.mean),
        (layer.moving_variance, np.var),
    ):
        expected = sum(statistic(half, axis=0) for half in halves) / 2
        for component in two.experimental_local_results(variable):
            np.testing.assert_allclose(
                ops.convert_to_numpy(component), expected, atol=1e-6
            )
    assert "differ" not in caplog.text


def test_replica_without_rows_in_run(two):
    """The others' statistics count, and a gradient is finite."""
    with two.scope():
        layer = layers.BatchNormalization(momentum=0.0)
        layer.build(X.shape)

    def step(x):
        def loss():
            return ops.sum(layer(x, training=True) ** 2)

        _, gradients = ks.value_and_grad(loss, layer.trainable_variables)()
        return ks.get_replica_context().all_reduce("sum", gradients)

    for batch in two.experimental_distribute_dataset([X[:1]]):
        gradients = two.experimental_local_results(two.run(step, args=(batch,)))[0]
    # The second replica keeps what it had: a mean of 0 and a variance of 1.
    expected = [X[0] / 2, np.full(4, 0.5)]
    found = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    assert largest(expected, list(found)) < 1e-6
    assert all(np.isfinite(ops.convert_to_numpy(g)).all() for g in gradients)


def test_float16_statistics(two):
    """The statistics themselves are of float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:

        def statistics(strategy):
            keras.utils.set_random_seed(1)
            layer = layers.BatchNormalization(momentum=0.0)
            with scope(strategy):
                model = of(layer)
            model.fit(X[:13], Y[:13], batch_size=13, verbose=0)
            return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]

        assert largest(statistics(None), statistics(two)) < 1e-6
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.full(keep_on="torch")
def test_saved_model_is_plain_keras(of_all, tmp_path):
    def make():
        return of(layers.Dense(4, name="dense"), layers.BatchNormalization(name="n"))

    with of_all(2).scope():
        model = make()
    model.fit(X, Y, verbose=0)
    assert model.get_layer("n").synchronized is False
    plain = make()
    for ours, theirs in zip(model.layers, plain.layers, strict=True):
        config = json.dumps(keras.saving.serialize_keras_object(ours))
        if ours.name in ("dense", "n"):
            assert config == json.dumps(keras.saving.serialize_keras_object(theirs))
        assert "keras_strategy" not in config
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    predicted = [m.predict(X, verbose=0) for m in (model, loaded)]
    assert largest(*[[p] for p in predicted]) < 1e-6


def test_local_statistics_are_named_once_for_many_layers(two, of_all, caplog):
    caplog.set_level("INFO", "keras_strategy")

    def named(strategy, count):
        caplog.clear()
        with strategy.scope():
            model = of(*[layers.BatchNormalization() for _ in range(count)])
            model.build((None, 4))
        for _ in range(2):
            compiled(model, run_eagerly=True)
            model.fit(X[:4], Y[:4], verbose=0)
        return [x for x in logged(caplog) if 'batch_statistics="local"' in x]

    matters = keras.backend.backend() != "jax"
    assert len(named(two, 21)) == matters
    assert not named(two, 20) and not named(of_all(2, "local"), 21)


def test_bad_choices_are_refused(two, of_all):
    assert two.batch_statistics is None
    assert ks.OneDeviceStrategy("cpu:0").batch_statistics is None
    strategy = of_all(2)
    assert strategy.batch_statistics == "global"
    assert pickle.loads(pickle.dumps(strategy)).batch_statistics == "global"
    for make in (ks.MirroredStrategy, ks.MultiWorkerMirroredStrategy):
        with pytest.raises(ValueError, match="'global' or 'local'.*='whole'"):
            make(batch_statistics="whole")
    # Of one worker it is the same.
    alone = ks.MultiWorkerMirroredStrategy(batch_statistics="global")
    assert alone.batch_statistics == "global"
