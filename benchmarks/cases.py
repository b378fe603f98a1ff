"""Models that are timed, and the data that they are trained on.

Most are small: on two cores a step of a large one is all arithmetic, and what a
strategy adds to it could not be seen. Some data is drawn by a generator: what is learnt
of it does not matter.
"""

import functools
import pydoc_data.topics
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks import comparisons as names
from benchmarks.comparisons import REHEARSAL

CHARACTERS = 96  # those of ASCII that print, and one for all others
WORDS = 8192
TOPICS = 16


# Makes a model, not compiled, with logits as its output.
Build = Callable[[], keras.Model]
# Gives the inputs and the integer targets of a set.
Load = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """A model with its data, and the rows of a global batch."""

    name: str
    build: Build
    load: Load
    batch: int

    def compiled(
        self, steps_per_execution: int = 1, jit_compile: bool | str = "auto"
    ) -> keras.Model:
        """Return the model, ready for `fit`."""
        model = self.build()
        how = {"steps_per_execution": steps_per_execution, "jit_compile": jit_compile}
        model.compile(optimizer(), loss(), metrics=["accuracy"], **how)
        return model

    @functools.lru_cache(maxsize=2)  # noqa: B019, the cases live as long as the process
    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return so many rows of the data, which repeat if there are fewer."""
        x, y = self.load()
        index = np.arange(count) % len(x)
        return x[index], y[index]

    def batches(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the shuffled global batches of an epoch."""
        x, y = self.rows(steps * self.batch)
        order = np.random.default_rng(0).permutation(len(x)).reshape(steps, -1)
        return ((x[rows], y[rows]) for rows in order)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


def loss(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def build_mlp(units: int = 256, hidden: int = 2, rate: float = 0.0) -> keras.Model:
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(hidden):
        model.add(layers.Dense(units, "relu"))
        if rate:
            model.add(layers.Dropout(rate))
    model.add(layers.Dense(10))
    return model


def _cnn(
    side: int = 8,
    channels: int = 1,
    filters: tuple = (32, 64),
    pools: bool = False,
    normalizes: bool = True,
) -> keras.Model:
    """Return a CNN; if `pools`, with pooling after each convolution."""
    model = keras.Sequential([keras.Input((side, side, channels))])
    for number, count in enumerate(filters, 1):
        options = {"use_bias": False} if normalizes else {"activation": "relu"}
        model.add(layers.Conv2D(count, 3, padding="same", **options))
        if normalizes:
            model.add(layers.BatchNormalization())
            model.add(layers.Activation("relu"))
        if pools or number == len(filters):
            model.add(layers.MaxPooling2D(2))
    for layer in (layers.Flatten(), layers.Dense(10)):
        model.add(layer)
    return model


def _resnet50() -> keras.Model:
    build = keras.applications.ResNet50
    return build(weights=None, input_shape=(32, 32, 3), classes=10)


def _transformer(
    words: int = CHARACTERS,
    length: int = 64,
    width: int = 64,
    blocks: int = 2,
    heads: int = 2,
    rate: float = 0.0,
) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads, dropout=rate)
        y = attention(y, y, use_causal_mask=True)
        if rate:
            y = layers.Dropout(rate)(y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, "gelu")(y)
        y = layers.Dense(width)(y)
        if rate:
            y = layers.Dropout(rate)(y)
        x = layers.Add()([x, y])
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(words, dtype="float32")(x))


def _embedding() -> keras.Model:
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
    inputs, targets = codes[: rows * 64], codes[1 : rows * 64 + 1]
    return inputs.reshape(rows, 64), targets.reshape(rows, 64)


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


@functools.cache
def _drawn_images(side: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2048, side, side, 3)).astype("float32")
    return x, draw.integers(0, classes, len(x)).astype("int32")


@functools.cache
def _drawn_words(words: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, words, (1024, length + 1))
    drawn = drawn.astype("int32")
    return drawn[:, :-1], drawn[:, 1:]


_drawn_digits = functools.partial(_drawn_images, 32, 10)
CPU_CASES = (
    Case(names.MLP, build_mlp, _digits, 128),
    Case(names.LARGE_MLP, build_mlp, _digits, 1024),
    # 9 MB of gradients: enough to send some of them while others are computed.
    Case(names.WIDE_MLP, functools.partial(build_mlp, 1024, 3), _digits, 256),
    Case(names.CNN, functools.partial(_cnn, normalizes=False), _images, 128),
    Case(names.NORMALIZED, _cnn, _images, 128),
    Case(
        names.LARGE_NORMALIZED,
        functools.partial(_cnn, 32, 3, (32, 64, 128), pools=True),
        _drawn_digits,
        64,
    ),
    Case(names.RESNET50, _resnet50, _drawn_digits, 64),
    Case(names.TRANSFORMER, _transformer, _next_characters, 16),
    Case(names.EMBEDDING, _embedding, _topics_of_words, 128),
    Case(names.DROPOUT[0], functools.partial(build_mlp, rate=0.2), _digits, 128),
    Case(
        names.DROPOUT[1],
        functools.partial(_transformer, rate=0.1),
        _next_characters,
        16,
    ),
)


# --- those of GPUs, which are small if CPU devices stand for them

SIDE, CLASSES = (8, 10) if REHEARSAL else (32, 100)
FILTERS = (4, 8) if REHEARSAL else (64, 128, 256, 512)
_WORDS, _LENGTH = (64, 8) if REHEARSAL else (WORDS, 128)
_SIZE = (16, 1, 2) if REHEARSAL else (512, 6, 8)


def _smooth_cnn() -> keras.Model:
    image = x = keras.Input((SIDE, SIDE, 3))
    for filters in FILTERS[:3]:
        x = layers.Conv2D(filters, 3, padding="same", activation="gelu")(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(CLASSES, dtype="float32")(x))


def _resnet() -> keras.Model:
    def convolved(x, filters, strides):
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    image = keras.Input((SIDE, SIDE, 3))
    x = layers.Activation("relu")(convolved(image, FILTERS[0], 1))
    for group, filters in enumerate(FILTERS):
        for block in range(2):
            strides = 2 if group and not block else 1
            y = layers.Activation("relu")(convolved(x, filters, strides))
            y = convolved(y, filters, 1)
            if strides == 2:
                x = layers.Conv2D(filters, 1, 2, use_bias=False)(x)
                x = layers.BatchNormalization()(x)
            x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(CLASSES, dtype="float32")(x))


def _gpu_case(name: str, build: Build, load: Load, batch: int) -> Case:
    """Return a case whose name ends with its precision."""

    def build_with_policy() -> keras.Model:
        previous = keras.config.dtype_policy()
        is_half = name.endswith("bfloat16")
        keras.config.set_dtype_policy("mixed_bfloat16" if is_half else "float32")
        try:
            return build()
        finally:
            keras.config.set_dtype_policy(previous)

    return Case(name, build_with_policy, load, batch // 8 if REHEARSAL else batch)


_large_transformer = functools.partial(_transformer, _WORDS, _LENGTH, *_SIZE)
_words = functools.partial(_drawn_words, _WORDS, _LENGTH)
_large_images = functools.partial(_drawn_images, SIDE, CLASSES)
GPU_CASES = (
    _gpu_case(names.EXACT_CNN, _smooth_cnn, _large_images, 512),
    _gpu_case(names.EXACT_TRANSFORMER, _large_transformer, _words, 16),
    _gpu_case(names.ON_GPUS[0], _large_transformer, _words, 32),
    _gpu_case(names.ON_GPUS[1], _resnet, _large_images, 256),
    _gpu_case(names.ON_GPUS[2], _smooth_cnn, _large_images, 512),
)
CASES = {case.name: case for case in (*CPU_CASES, *GPU_CASES)}
