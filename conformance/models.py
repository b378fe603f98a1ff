"""Small data sets and models of all programs. All data is made up, from a seed.

Functions of data return inputs, targets and perhaps sample weights.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

FEATURES, CLASSES, STEPS, WORDS = 4, 3, 6, 7
# Keras 3.13 has no renormalization.
_HAS_RENORM = "renorm" in inspect.signature(layers.BatchNormalization).parameters
RENORM: dict[str, Any] = {"renorm": True} if _HAS_RENORM else {}

Make = layers.Layer | Callable[[], layers.Layer]


def regression(rows: int) -> tuple[Any, Any]:
    """Return rows of 4 features, and a target that depends on them."""
    rng = np.random.RandomState(1)
    x = rng.randn(rows, FEATURES).astype("float32")
    return x, x[:, :1] * 2 + rng.randn(rows, 1).astype("float32")


def weights_of(shape: int | tuple[int, ...]) -> np.ndarray:
    """Return a sample weight for each row, or for each step of each row."""
    return np.random.RandomState(4).random_sample(shape).astype("float32")


def weighted_regression(rows: int) -> tuple[Any, Any, Any]:
    """Return regression data with a sample weight for each row."""
    return *regression(rows), weights_of(rows)


def classes(rows: int) -> tuple[Any, Any]:
    """Return rows of 4 features, and a class of 3."""
    rng = np.random.RandomState(2)
    x = rng.randn(rows, FEATURES).astype("float32")
    return x, rng.randint(0, CLASSES, rows).astype("int32")


def weighted_classes(rows: int) -> tuple[Any, Any, Any]:
    """Return classes with a sample weight for each row."""
    return *classes(rows), weights_of(rows)


def one_hot(rows: int) -> tuple[Any, Any]:
    """Return classes as one-hot vectors."""
    x, y = classes(rows)
    return x, np.eye(CLASSES, dtype="float32")[y]


def binary(rows: int) -> tuple[Any, Any]:
    """Return rows of 4 features, and a target of 0 or 1."""
    x, y = classes(rows)
    return x, (y[:, None] > 0).astype("float32")


def two_targets(rows: int) -> tuple[Any, Any]:
    """Return rows of 4 features, and the targets of `two_outputs`."""
    x, y = regression(rows)
    return x, {"p": y, "q": abs(y)}


def words(rows: int) -> tuple[Any, Any]:
    """Return sequences of words, in which 0 is padding, and a class for each word."""
    rng = np.random.RandomState(3)
    x = rng.randint(1, WORDS, (rows, STEPS)).astype("int32")
    x *= np.arange(STEPS) < rng.randint(2, STEPS + 1, (rows, 1))
    return x, rng.randint(0, CLASSES, (rows, STEPS)).astype("int32")


def labels(rows: int) -> tuple[Any, Any]:
    """Return words, and two labels for CTC. The class 0 is the blank."""
    x, y = words(rows)
    return x, y[:, :2].clip(1)


def steps(rows: int) -> tuple[Any, Any]:
    """Return sequences in which some steps are all zero, and a target for each step."""
    rng = np.random.RandomState(5)
    x = rng.randn(rows, STEPS, 2) * (rng.rand(rows, STEPS, 1) > 0.4)
    return x.astype("float32"), rng.randn(rows, STEPS, 1).astype("float32")


def images(rows: int, channels: int = 1) -> tuple[Any, Any]:
    """Return images of 8 x 8 pixels, and a class of 3."""
    rng = np.random.RandomState(6)
    x = rng.random_sample((rows, 8, 8, channels)).astype("float32")
    return x, classes(rows)[1]


def with_a_row_of_zeros(rows: int, row: int = 15) -> tuple[Any, Any]:
    """Return regression data with a row of zeros, the last replica's."""
    x, y = regression(rows)
    x[row] = 0.0
    return x, y


def mlp(*middle: Make, outputs: int = 1) -> keras.Model:
    """Return two dense layers, and others between them."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            # Without a bias, whose gradient before a normalization would be pure
            # rounding noise, which Adam scales up to whole steps.
            layers.Dense(8, use_bias=False),
            *map(_made, middle),
            layers.Activation("tanh"),
            layers.Dense(outputs),
        ]
    )


def _made(layer: Make) -> layers.Layer:
    return layer if isinstance(layer, layers.Layer) else layer()


def compiled(
    model: keras.Model | None = None,
    optimizer: Any = None,
    loss: Any = "mse",
    **compile: Any,
) -> keras.Model:
    """Compile a model: an MLP with Adam by default."""
    model = mlp() if model is None else model
    assert model is not None
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **compile)
    return model


def with_sgd(
    model: keras.Model, optimizer: Any = None, *args: Any, **compile: Any
) -> keras.Model:
    """Compile a model, with SGD by default.

    Adam scales the rounding of a gradient that is zero up to whole steps, so it is not
    the optimizer of programs about something else.
    """
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    return compiled(model, optimizer, *args, **compile)


def regressor(*middle: Make, optimizer: Any = None, **compile: Any) -> keras.Model:
    """Return a compiled MLP of one output."""
    return with_sgd(mlp(*middle), optimizer, **compile)


def classifier(*middle: Make, **compile: Any) -> keras.Model:
    """Return a compiled classifier of three classes."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return with_sgd(mlp(*middle, outputs=CLASSES), loss=loss, **compile)


def image_classifier(*middle: layers.Layer) -> keras.Model:
    """Return a compiled classifier of images."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ends = keras.Input((8, 8, 1)), layers.Dense(CLASSES)
    return with_sgd(keras.Sequential([ends[0], *middle, ends[1]]), loss=loss)


def sequences(embedding: layers.Layer) -> keras.Model:
    """Return a model of embedded words, an LSTM, and a class for each word."""
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            embedding,
            layers.LSTM(4, return_sequences=True),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def tagger(embedding: layers.Layer, **compile: Any) -> keras.Model:
    """Return a compiled model of `sequences`."""
    compile.setdefault("loss", "sparse_categorical_crossentropy")
    return with_sgd(sequences(embedding), **compile)


def masked_steps(*middle: Make, steps: int = STEPS) -> keras.Model:
    """Return a model that leaves out the steps that are all zero."""
    return keras.Sequential(
        [
            keras.Input((steps, 2)),
            layers.Masking(),
            layers.Dense(4, use_bias=False),
            *map(_made, middle),
            layers.LSTM(4, return_sequences=True),
            layers.Dense(1),
        ]
    )


def two_outputs() -> keras.Model:
    """Return a model of one input, and two outputs "p" and "q"."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in ("p", "q")}
    return keras.Model(inputs, outputs)


def softmax_outputs(names: Sequence[str]) -> keras.Model:
    """Return a model of one input, and probabilities of classes by several names."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    softmax = layers.Dense(CLASSES, "softmax")(hidden)
    return keras.Model(inputs, {n: layers.Identity(name=n)(softmax) for n in names})


def with_lora() -> keras.Model:
    """Return an MLP with a layer whose weights are adapted by LoRA."""
    dense = layers.Dense(8)
    model = mlp(dense)
    dense.enable_lora(2)
    return model


class Lambda(layers.Layer):
    """Layer that applies a function of its input."""

    def __init__(self, function: Callable[[Any], Any], **options: Any):
        super().__init__(**options)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class AddLoss(layers.Layer):
    """Layer that adds a function of its input to the loss, by default a mean square."""

    def __init__(self, function: Callable[[Any], Any] | None = None):
        super().__init__()
        self.function = function or (lambda x: 0.1 * ops.mean(ops.square(x)))

    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


class NotANumberAtZero(layers.Layer):
    """Layer that changes nothing, with a gradient of NaN for a row of zeros.

    f = x + 0 * sqrt(w * s) with s = 0 for such a row: the value is x, and
    df/dw = 0 * s / (2 * sqrt(w * s)) = 0 * 0 / 0.
    """

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        s = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return x + 0.0 * ops.sqrt(self.scale * s)


class Total(keras.metrics.Metric):
    """Sum of the absolute targets: a custom metric with state."""

    def __init__(self, name: str = "total"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(ops.cast(y_true, self.dtype))))

    def result(self) -> Any:
        return ops.cast(self.total, self.dtype)


def concordance_loss(y: Any, y_pred: Any) -> Any:
    """Return 1 minus the concordance of all rows, which is no mean over rows."""
    mean, mean_pred = ops.mean(y), ops.mean(y_pred)
    shared = ops.mean((y - mean) * (y_pred - mean_pred))
    apart = ops.square(mean - mean_pred)
    return 1 - 2 * shared / (ops.var(y) + ops.var(y_pred) + apart + 0.1)


def normalized(x: Any) -> Any:
    """Return rows of length 1."""
    return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)
