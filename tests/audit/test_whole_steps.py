"""Steps that cannot be split by rows: they run whole and equal one device's."""

import functools
import random

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.audit.policy import kinds_that_run_whole
from tests.equality import models
from tests.equality.compare import assert_equal, largest, scope, train
from tests.training.shared import alone, logged

BACKEND = keras.backend.backend()
# By batches of 8 the last one has 4 rows: even ones, as some programs need.
X, Y = models.regression(20)


class Centering(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def subtract_mean(x, factor):
    return x - factor * ops.mean(x, axis=0, keepdims=True)


def functional_ops():
    """Keras's operations over the batch dimension."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3)(inputs)
    centered = hidden - ops.mean(hidden, axis=0, keepdims=True)
    return models.compiled(keras.Model(inputs, layers.Dense(1)(ops.tanh(centered))))


class Halves(keras.Sequential):
    """Two views in one batch, which the loss compares."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        first, second = ops.split(y_pred, 2, axis=0)
        return ops.mean(ops.square(first - second - 0.5))


class HardestRows(keras.Sequential):
    """Trains on the 3 rows with the largest error."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return ops.mean(ops.top_k(ops.square(y - y_pred)[:, 0], 3)[0])


class GroupDeviation(layers.Layer):
    """Appends the standard deviation of groups of 4 rows, as StyleGAN2 does."""

    def call(self, x):
        groups = ops.reshape(x, (4, -1, x.shape[-1]))
        deviation = ops.mean(ops.std(groups, axis=0), axis=-1, keepdims=True)
        return ops.concatenate([x, ops.tile(deviation, (4, 1))], axis=-1)

    def compute_output_shape(self, shape):
        return (*shape[:-1], shape[-1] + 1)


def pairs():
    """A row of scores for each pair of rows; the labels are rows, as in CLIP."""
    inputs = keras.Input((4,))
    query = layers.Dense(3)(inputs)
    model = keras.Model(inputs, ops.matmul(query, ops.transpose(query)))
    loss = keras.losses.sparse_categorical_crossentropy
    return models.compiled(model, loss=lambda y, p: loss(y, p, from_logits=True))


PAIR_LABELS = np.arange(len(X), dtype="int32") % 8


def compare_rows(y_true, y_pred, factor=1.0):
    """A number for each row, which depends on the others."""
    others = ops.max(y_pred - ops.transpose(y_pred), axis=1)
    return ops.mean(ops.square(y_true - y_pred), axis=-1) + factor * others


class HasMethod:
    def loss(self, y_true, y_pred):
        return compare_rows(y_true, y_pred)


class HasSlots:
    __slots__ = ()

    def __call__(self, y_true, y_pred):
        return compare_rows(y_true, y_pred)


@functools.wraps(keras.losses.mean_squared_error)
def wrapped(y_true, y_pred):
    return compare_rows(y_true, y_pred)


class UnusedLayer(keras.Model):
    """One of its layers is never called."""

    def __init__(self):
        super().__init__()
        self.body, self.unused = models.mlp(Centering), layers.Dense(3)

    def call(self, x):
        return self.body(x)


class HostRandom(layers.Layer):
    """Draws as LayerDrop and Mixup do, from generators of the process."""

    def call(self, x, training=False):
        return x * float(np.random.rand() + random.random()) if training else x


class RareBranch(layers.Layer):
    """A branch that only some rows need, and so only some replicas."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.usual.build(shape)
        self.rare.build(shape)

    def call(self, x):
        result = self.usual(x)
        if isinstance(x, keras.KerasTensor) or not bool(ops.any(x[:, 0] > 1)):
            return result
        return result + self.rare(x) * ops.cast(x[:, :1] > 1, x.dtype)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)


def rare_branch():
    """Its gradients may be missing, so that Adam is not used."""
    model = keras.Sequential([keras.Input((4,)), RareBranch(), layers.Dense(1)])
    return models.compiled(model, keras.optimizers.SGD(0.1), run_eagerly=True)


def float8():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16)])
    model.quantize("float8")
    return models.compiled(model, keras.optimizers.SGD(0.05))


WIDE = np.random.RandomState(0).randn(len(X), 16).astype("float32")
WIDE[1] *= 6


class Centers(layers.Layer):
    """Pulls rows towards a center, which is a moving mean of the rows."""

    def build(self, shape):
        self.center = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="center"
        )

    def call(self, x, training=False):
        self.add_loss(0.1 * ops.mean(ops.square(x - self.center)))
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return x


class DataDependentShift(layers.Layer):
    """Its first batch decides what it subtracts."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.shift = self.add_weight(shape=shape[1:], name="shift", **options)
        self.is_set = self.add_weight(shape=(), name="is_set", **options)

    def call(self, x, training=False):
        if training:
            mean = ops.mean(x, axis=0)
            self.shift.assign(ops.where(self.is_set > 0, self.shift, mean))
            self.is_set.assign(1.0)
        return x - self.shift


class Accumulating(keras.Sequential):
    """Adds gradients up in the step and applies those of two batches."""

    def make_state(self):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.trainable_variables
        ]
        return self

    def train_step(self, data):
        x, y = data
        loss, gradients = ks.value_and_grad(
            lambda: ops.mean(ops.square(self(x) - y)), self.trainable_variables
        )()
        self.steps.assign_add(1.0)
        is_second = ops.cast(ops.equal(self.steps % 2.0, 0.0), "float32")
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        sums = [total * is_second for total in self.sums]
        self.optimizer.apply(sums, self.trainable_variables)
        for total in self.sums:
            total.assign(total * (1.0 - is_second))
        return {"loss": loss}


class PythonMetric(keras.metrics.Metric):
    """Keeps a list of means."""

    def __init__(self):
        super().__init__(name="python")
        self.means = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.means.append(ops.mean(ops.abs(y_true - y_pred)))

    def result(self):
        return sum(self.means) / max(len(self.means), 1)

    def reset_state(self):
        self.means = []


def dense(cls=keras.Sequential):
    return cls([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


def accumulating():
    # Of a gradient accumulator nothing is applied in every other step.
    return models.compiled(dense(Accumulating).make_state(), keras.optimizers.SGD(0.1))


def with_layer(make):
    return lambda: models.compiled(models.mlp(make))


def with_loss(loss):
    return lambda: models.compiled(loss=loss)


SGD = keras.optimizers.SGD
NOT_ON_JAX = "accumulator", "host random", "python metric", "rare branch"
# What makes a model, the kinds of steps that run whole, and options of `train`.
PROGRAMS = {
    "functional ops": (functional_ops, "train predict", {}),
    "activation": (
        with_layer(lambda: layers.Dense(3, lambda x: x / ops.max(ops.abs(x)))),
        "train predict",
        {},
    ),
    "partial as activation": (
        with_layer(
            lambda: layers.Dense(3, functools.partial(subtract_mean, factor=0.5))
        ),
        "train predict",
        {},
    ),
    "softmax over rows": (
        with_layer(lambda: layers.Softmax(axis=-2)),
        "train predict",
        {},
    ),
    "cosine over rows": (
        with_loss(keras.losses.CosineSimilarity(axis=0)),
        "train",
        {},
    ),
    "unused layer": (lambda: models.compiled(UnusedLayer()), "train predict", {}),
    "group deviation": (with_layer(GroupDeviation), "train predict", {}),
    "halves": (lambda: models.compiled(dense(Halves)), "train", {}),
    "hardest rows": (lambda: models.compiled(dense(HardestRows)), "train", {}),
    "pairs": (pairs, "train predict", {"y": PAIR_LABELS, "shuffle": False}),
    "partial as loss": (
        with_loss(functools.partial(compare_rows, factor=0.5)),
        "train",
        {},
    ),
    "method as loss": (with_loss(HasMethod().loss), "train", {}),
    "wraps as loss": (with_loss(wrapped), "train", {}),
    "slots as loss": (with_loss(HasSlots()), "train", {}),
    "host random": (
        lambda: models.compiled(models.mlp(HostRandom), run_eagerly=True),
        "train",
        {},
    ),
    "rare branch": (rare_branch, "train", {"shuffle": False}),
    "float8": (float8, "train", {"x": WIDE, "y": WIDE[:, ::-1].copy()}),
    "centers": (with_layer(Centers), "train", {}),
    "data-dependent shift": (with_layer(DataDependentShift), "train", {}),
    "accumulator": (accumulating, "train", {}),
    "python metric": (
        lambda: models.compiled(metrics=[PythonMetric()], run_eagerly=True),
        "train",
        {},
    ),
}


def check(name, strategy, caplog, rows=None):
    """Assert that a program equals one device's, and return what runs whole."""
    make, kinds, options = PROGRAMS[name]
    kinds = set() if BACKEND == "jax" else set(kinds.split())
    options = {"x": X, "y": Y, "predicted": 8 * ("predict" in kinds), **options}
    one = alone(make, **options)
    caplog.clear()
    many = train(strategy, make, **options)
    assert_equal(one, many)
    return many.model, kinds


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_one_device(name, replicas, mirrored, caplog):
    if BACKEND == "jax" and name in NOT_ON_JAX:
        pytest.skip("`fit` is one program, which is traced once")
    model, kinds = check(name, mirrored(replicas), caplog)
    assert kinds_that_run_whole(model) == kinds
    messages = logged(caplog)
    assert len(messages) == len(kinds)
    assert all("runs whole" in message for message in messages)


def test_batch_of_one_row_per_replica(replicas, mirrored):
    make = with_layer(Centering)
    options = {"batch_size": replicas, "epochs": 1, "predicted": replicas}
    x, y = X[: 2 * replicas + 1], Y[: 2 * replicas + 1]
    assert_equal(
        alone(make, x, y, **options), train(mirrored(replicas), make, x, y, **options)
    )


def test_evaluate_and_predict_without_training(mirrored, caplog):
    found = []
    for strategy in (None, mirrored(3)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = models.compiled(models.mlp(Centering), metrics=["mae"])
        evaluated = model.evaluate(X, Y, batch_size=8, verbose=0)
        found.append([*evaluated, model.predict(X, batch_size=8, verbose=0)])
    assert largest(*found) < 1e-5
    expected = set() if BACKEND == "jax" else {"test", "predict"}
    assert kinds_that_run_whole(model) == expected
    assert len(logged(caplog)) == len(expected)


def test_validation_in_fit_equals_one_device(mirrored):
    make, options = with_layer(Centering), {"predicted": 0}
    options["validation_data"] = X[:11] + 1, Y[:11]
    one, many = (train(s, make, X, Y, **options) for s in (None, mirrored(3)))
    assert_equal(one, many)
    expected = set() if BACKEND == "jax" else {"train", "test"}
    assert kinds_that_run_whole(many.model) == expected


@pytest.mark.skipif(BACKEND == "tensorflow", reason="not available there")
@pytest.mark.parametrize("name", ["group deviation", "halves"])
def test_virtual_replicas_equal_one_device(name, caplog):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)
    make, kinds, _ = PROGRAMS[name]
    options = {"x": X, "y": Y, "predicted": 8 * ("predict" in kinds)}
    one, many = (train(s, make, **options) for s in (None, strategy))
    assert_equal(one, many)
    assert kinds_that_run_whole(many.model) == set(kinds.split())


@pytest.mark.parametrize("name", ["halves", "unused layer"])
def test_sharded_optimizer_equals_one_device(name, caplog):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer")
    make, kinds, _ = PROGRAMS[name]
    options = {"x": X, "y": Y, "predicted": 8 * ("predict" in kinds)}
    one, many = alone(make, **options), train(strategy, make, **options)
    assert_equal(one, many)


def test_central_storage_equals_one_device(caplog):
    strategy = ks.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    model, kinds = check("centers", strategy, caplog)
    assert kinds_that_run_whole(model) == kinds


def test_compile_decides_again(mirrored):
    found = []
    for strategy in (None, mirrored(3)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = models.mlp()
        for loss in (compare_rows, "mse", compare_rows):
            models.compiled(model, keras.optimizers.SGD(0.1), loss)
            model.fit(X, Y, batch_size=8, verbose=0)
            is_whole = strategy is not None and BACKEND != "jax" and loss != "mse"
            assert kinds_that_run_whole(model) == ({"train"} if is_whole else set())
        found.append(model.get_weights())
    assert largest(*found) < 2e-5


def test_ordinary_model_is_split(mirrored, caplog):
    def make():
        middle = lambda: layers.Dropout(0.3, seed=1), lambda: layers.Dense(4, "gelu")
        return models.compiled(models.mlp(*middle), metrics=["mae"])

    one, many = (train(s, make, X, Y) for s in (None, mirrored(3)))
    assert_equal(one, many)
    assert not kinds_that_run_whole(many.model) and not logged(caplog)


def test_error_of_one_device_is_raised(two):
    def fail(y_true, y_pred):
        raise KeyError("no such label")

    for strategy in (None, two):
        with scope(strategy):
            model = models.compiled(loss=fail)
        with pytest.raises(KeyError, match="no such label"):
            model.fit(X, Y, batch_size=8, verbose=0)
