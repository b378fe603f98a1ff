"""Small models and data for the equality table. All of it is made up, from a seed."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks

FEATURES, CLASSES, STEPS, WORDS = 4, 3, 6, 5
# Keras 3.13 has no renormalization.
_HAS_RENORM = "renorm" in inspect.signature(layers.BatchNormalization).parameters
RENORM: dict[str, Any] = {"renorm": True} if _HAS_RENORM else {}


def regression(rows: int) -> tuple[Any, Any]:
    """Rows of 4 features, and a target that depends on them."""
    rng = np.random.RandomState(1)
    x = rng.randn(rows, FEATURES).astype("float32")
    return x, x[:, :1] * 2 + rng.randn(rows, 1).astype("float32")


def classes(rows: int) -> tuple[Any, Any]:
    """Rows of 4 features, and a class of 3."""
    rng = np.random.RandomState(2)
    return (
        rng.randn(rows, FEATURES).astype("float32"),
        rng.randint(0, CLASSES, rows),
    )


def words(rows: int) -> tuple[Any, Any]:
    """Sequences of words, where 0 means no word, and a class for each word."""
    rng = np.random.RandomState(3)
    return (
        rng.randint(0, WORDS, (rows, STEPS)),
        rng.randint(0, CLASSES, (rows, STEPS)),
    )


def weights_of(shape: int | tuple[int, ...]) -> np.ndarray:
    """Sample weights: one for each row, or one for each word of each row."""
    return np.random.RandomState(4).random_sample(shape).astype("float32")


def mlp(*middle: Callable[[], layers.Layer], outputs: int = 1) -> keras.Model:
    """Two dense layers, and others between them."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            # Without a bias, whose gradient before a normalization would be pure
            # rounding noise, which Adam scales up to whole steps.
            layers.Dense(8, use_bias=False),
            *(make() for make in middle),
            layers.Activation("tanh"),
            layers.Dense(outputs),
        ]
    )


def compiled(
    model: keras.Model | None = None,
    optimizer: Any = None,
    loss: Any = "mse",
    **compile: Any,
) -> keras.Model:
    """Compiles a model, an MLP with Adam unless told otherwise."""
    model = mlp() if model is None else model
    assert model is not None
    optimizer = keras.optimizers.Adam(0.01) if optimizer is None else optimizer
    model.compile(optimizer, loss, **compile)
    return model


def sequences(embedding: layers.Layer) -> keras.Model:
    """Embedded words through an LSTM to a class for each word."""
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            embedding,
            layers.LSTM(4, return_sequences=True),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def two_outputs() -> keras.Model:
    """One input, and two outputs "p" and "q"."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in ("p", "q")}
    return keras.Model(inputs, outputs)


def softmax_outputs(names: Sequence[str]) -> keras.Model:
    """One input, and the same probabilities of classes under several names."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    softmax = layers.Dense(CLASSES, "softmax")(hidden)
    return keras.Model(inputs, {n: layers.Identity(name=n)(softmax) for n in names})


def steps(rows: int) -> tuple[Any, Any]:
    """Sequences of 6 steps of which some are all zero, and a target for each step."""
    rng = np.random.RandomState(5)
    x = rng.randn(rows, STEPS, 2).astype("float32")
    return x * (rng.rand(rows, STEPS, 1) > 0.4), rng.randn(rows, STEPS, 1)


def masked_steps(
    *middle: Callable[[], layers.Layer], steps: int = STEPS
) -> keras.Model:
    """Leaves out the steps that are all zero."""
    return keras.Sequential(
        [
            keras.Input((steps, 2)),
            layers.Masking(),
            layers.Dense(4, use_bias=False),
            *(make() for make in middle),
            layers.LSTM(4, return_sequences=True),
            layers.Dense(1),
        ]
    )


class AddedLoss(layers.Layer):
    """Adds the mean square of its input to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class NotANumberAtZero(layers.Layer):
    """Changes nothing, but the gradient of its weight is NaN for a row of zeros.

    f = x + 0 * sqrt(w * s) with s = 0 for such a row: the value is x, and
    df/dw = 0 * s / (2 * sqrt(w * s)) = 0 * 0 / 0.
    """

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        s = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return x + 0.0 * ops.sqrt(self.scale * s)


def with_a_row_of_zeros(rows: int) -> tuple[Any, Any]:
    """Return data in which the last replica's row of the second batch is zero."""
    x, y = regression(rows)
    x[15] = 0.0
    return x, y


class OwnReduction(keras.Model):
    """A model whose own `compute_loss` reduces what a loss left unreduced."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.each = keras.losses.MeanSquaredError(reduction="none")

    def call(self, x):
        return self.body(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.mean(self.each(y, y_pred))


class Total(keras.metrics.Metric):
    """The sum of the absolute targets: a stateful metric of somebody's own."""

    def __init__(self, name="total"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(ops.cast(y_true, self.dtype))))

    def result(self):
        return ops.cast(self.total, self.dtype)


class Largest(keras.metrics.Metric):
    """The largest absolute target. Replicas look at each other's, and hold the same.

    A maximum is no sum of the replicas' parts, so it is not left to be added up.
    """

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable(
            (), "zeros", aggregation="only_first_replica", name="largest"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = ops.max(ops.abs(ops.cast(y_true, self.dtype)), keepdims=True)
        replica = ks.get_replica_context()
        if replica is not None:  # else all rows are here
            largest = replica.all_gather(ops.reshape(largest, (1,)), axis=0)
        self.largest.assign(ops.maximum(self.largest, ops.max(largest)))

    def result(self):
        return ops.cast(self.largest, self.dtype)


class Choice(layers.Layer):
    """The most probable class."""

    def call(self, x):
        return ops.argmax(x, axis=-1)


class OwnMetrics(keras.Model):
    """A model that updates metrics of values itself."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.rows = keras.metrics.Mean(name="mean of rows")
        self.scalar = keras.metrics.Mean(name="mean of a scalar")
        self.total = keras.metrics.Sum(name="sum")

    def call(self, x):
        return self.body(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        error = ops.abs(y - y_pred)
        self.rows.update_state(error)
        self.scalar.update_state(ops.mean(error))
        self.total.update_state(error)
        return super().compute_metrics(x, y, y_pred, sample_weight)
