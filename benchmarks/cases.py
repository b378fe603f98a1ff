"""The models that are timed, and what they are trained on.

Small models: on two cores a step of a large one is all arithmetic, and what a strategy
adds to it could not be seen.
"""

import functools
import pydoc_data.topics
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

CHARACTERS = 96  # those of ASCII that print, and one for all others
WORDS = 8192
TOPICS = 16


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        name: Its name in the results.
        build: Makes the model, not compiled, with logits as its output.
        load: Gives the inputs and the integer targets of a set, as NumPy arrays.
        batch: The rows of a global batch.
    """

    name: str
    build: Callable[[], keras.Model]
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    batch: int

    def compiled(
        self, steps_per_execution: int = 1, jit_compile: bool | str = "auto"
    ) -> keras.Model:
        """Return the model, ready for `fit`."""
        model = self.build()
        model.compile(
            optimizer(),
            loss(),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )
        return model

    @functools.lru_cache(maxsize=2)  # noqa: B019, the cases live as long as the process
    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """So many rows of the data, repeated where there are not as many."""
        x, y = self.load()
        index = np.arange(count) % len(x)
        return x[index], y[index]


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _mlp(rate: float = 0.0) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, "relu"),
            *_dropout(rate),
            layers.Dense(256, "relu"),
            *_dropout(rate),
            layers.Dense(10),
        ]
    )


def _wide_mlp() -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(1024, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


def _dropout(rate: float) -> list[keras.layers.Layer]:
    return [keras.layers.Dropout(rate)] if rate else []


def _cnn() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def _normalized_cnn() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
    for layer in (layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(10)):
        model.add(layer)
    return model


def _transformer(rate: float = 0.0) -> keras.Model:
    layers, width = keras.layers, 64
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(CHARACTERS, width)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(2, width // 2, dropout=rate)
        y = attention(y, y, use_causal_mask=True)
        for dropout in _dropout(rate):
            y = dropout(y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, "gelu")(y)
        y = layers.Dense(width)(y)
        for dropout in _dropout(rate):
            y = dropout(y)
        x = layers.Add()([x, y])
    logits = layers.Dense(CHARACTERS)(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


def _embedding() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32,), dtype="int32"),
            layers.Embedding(WORDS, 32),
            layers.GlobalAveragePooling1D(),
            layers.Dense(TOPICS),
        ]
    )


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # which a machine with GPUs may lack

    digits = load_digits()
    return (digits.data / 16).astype("float32"), digits.target.astype("int32")


def _images() -> tuple[np.ndarray, np.ndarray]:
    x, y = _digits()
    return x.reshape(-1, 8, 8, 1), y


@functools.cache
def _next_characters() -> tuple[np.ndarray, np.ndarray]:
    """Python's own documentation: 64 characters, and the one after each of them."""
    text = "\n".join(pydoc_data.topics.topics.values())
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
    codes = np.where((codes >= 32) & (codes < 127), codes - 32, CHARACTERS - 1)
    rows = (len(codes) - 1) // 64
    return (
        codes[: rows * 64].reshape(rows, 64),
        codes[1 : rows * 64 + 1].reshape(rows, 64),
    )


@functools.cache
def _topics_of_words() -> tuple[np.ndarray, np.ndarray]:
    """32 words of Python's documentation, and the topic (of 16) that they are from."""
    x, y = [], []
    for topic, text in enumerate(pydoc_data.topics.topics.values()):
        words = [zlib.crc32(word.encode()) % WORDS for word in text.split()]
        for begin in range(0, len(words) - 31, 32):
            x.append(words[begin : begin + 32])
            y.append(topic % TOPICS)
    order = np.random.default_rng(0).permutation(len(x))
    return np.array(x, "int32")[order], np.array(y, "int32")[order]


CASES = (
    Case("MLP, batch 128", _mlp, _digits, 128),
    Case("MLP, batch 1024", _mlp, _digits, 1024),
    # 9 MB of gradients: enough to send some of them while others are computed.
    Case("wide MLP", _wide_mlp, _digits, 256),
    Case("CNN", _cnn, _images, 128),
    Case("CNN with BatchNormalization", _normalized_cnn, _images, 128),
    Case("transformer", _transformer, _next_characters, 16),
    Case("embedding", _embedding, _topics_of_words, 128),
    Case("MLP with Dropout", functools.partial(_mlp, 0.2), _digits, 128),
    Case(
        "transformer with Dropout",
        functools.partial(_transformer, 0.1),
        _next_characters,
        16,
    ),
)
