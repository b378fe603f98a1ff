"""Small data sets and models that programs share. All data is made up, from a seed."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from conformance.program import Data

FEATURES, CLASSES, STEPS, WORDS = 4, 3, 6, 7


def regression(rows: int) -> Data:
    """Return rows of 4 features, and a target that depends on them."""
    rng = np.random.RandomState(1)
    x = rng.randn(rows, FEATURES).astype("float32")
    return Data(x, x[:, :1] * 2 + rng.randn(rows, 1).astype("float32"))


def weighted_regression(rows: int) -> Data:
    """Return regression data with a sample weight for each row."""
    data = regression(rows)
    weight = np.random.RandomState(4).random_sample(rows).astype("float32")
    return Data(data.x, data.y, weight)


def classes(rows: int) -> Data:
    """Return rows of 4 features, and a class of 3."""
    rng = np.random.RandomState(2)
    x = rng.randn(rows, FEATURES).astype("float32")
    return Data(x, rng.randint(0, CLASSES, rows).astype("int32"))


def weighted_classes(rows: int) -> Data:
    """Return classes with a sample weight for each row."""
    data = classes(rows)
    return Data(data.x, data.y, weighted_regression(rows).sample_weight)


def one_hot(rows: int) -> Data:
    """Return classes as one-hot vectors."""
    data = classes(rows)
    return Data(data.x, np.eye(CLASSES, dtype="float32")[data.y])


def binary(rows: int) -> Data:
    """Return rows of 4 features, and a target of 0 or 1."""
    data = classes(rows)
    return Data(data.x, (data.y[:, None] > 0).astype("float32"))


def words(rows: int) -> Data:
    """Return sequences of words, in which 0 is padding, and a class for each word."""
    rng = np.random.RandomState(3)
    x = rng.randint(1, WORDS, (rows, STEPS)).astype("int32")
    x *= np.arange(STEPS) < rng.randint(2, STEPS + 1, (rows, 1))
    return Data(x, rng.randint(0, CLASSES, (rows, STEPS)).astype("int32"))


def steps(rows: int) -> Data:
    """Return sequences in which some steps are all zero, and a target for each step."""
    rng = np.random.RandomState(5)
    x = rng.randn(rows, STEPS, 2) * (rng.rand(rows, STEPS, 1) > 0.4)
    return Data(x.astype("float32"), rng.randn(rows, STEPS, 1).astype("float32"))


def images(rows: int) -> Data:
    """Return images of 8 x 8 pixels, and a class of 3."""
    rng = np.random.RandomState(6)
    x = rng.random_sample((rows, 8, 8, 1)).astype("float32")
    return Data(x, classes(rows).y)


def compiled(
    model: keras.Model, optimizer: Any = None, loss: Any = "mse", **compile: Any
) -> keras.Model:
    """Compile a model, with SGD unless an optimizer is given.

    Adam scales the rounding of a gradient that is zero up to whole steps, so it is not
    the optimizer of programs about something else.
    """
    model.compile(optimizer or keras.optimizers.SGD(0.05), loss, **compile)
    return model


def mlp(*middle: layers.Layer, outputs: int = 1) -> keras.Model:
    """Return two dense layers, and others between them."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, use_bias=False),
            *middle,
            layers.Activation("tanh"),
            layers.Dense(outputs),
        ]
    )


def classifier(*middle: layers.Layer, **compile: Any) -> keras.Model:
    """Return a compiled classifier of three classes."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(mlp(*middle, outputs=CLASSES), loss=loss, **compile)


def image_classifier(*middle: layers.Layer) -> keras.Model:
    """Return a compiled classifier of images."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ends = keras.Input((8, 8, 1)), layers.Dense(CLASSES)
    return compiled(keras.Sequential([ends[0], *middle, ends[1]]), loss=loss)


def tagger(embedding: layers.Layer, **compile: Any) -> keras.Model:
    """Return a compiled model of embedded words, an LSTM, and a class for each word."""
    model = keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            embedding,
            layers.LSTM(4, return_sequences=True),
            layers.Dense(CLASSES, "softmax"),
        ]
    )
    compile.setdefault("loss", "sparse_categorical_crossentropy")
    return compiled(model, **compile)


class Lambda(layers.Layer):
    """Layer that applies a function of its input."""

    def __init__(self, function: Callable[[Any], Any], **options: Any):
        super().__init__(**options)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class AddLoss(layers.Layer):
    """Layer that adds a function of its input to the loss."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


def normalized(x: Any) -> Any:
    """Return rows of length 1."""
    return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)
