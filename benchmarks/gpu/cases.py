"""The models that are timed and compared on GPUs, and what they are trained on.

Numbers drawn by a generator: what is learnt of them does not matter here.
"""

import functools
import os
from collections.abc import Callable

import keras
import numpy as np

from benchmarks.cases import Case

# Everything small, where CPU devices stand for GPUs.
REHEARSAL = bool(os.environ.get("BENCHMARKS_GPU_REHEARSAL"))
SIDE, CLASSES, WORDS = (8, 10, 64) if REHEARSAL else (32, 100, 8192)
LENGTH, WIDTH, BLOCKS, HEADS = (8, 16, 1, 2) if REHEARSAL else (128, 512, 6, 8)
FILTERS = (4, 8) if REHEARSAL else (64, 128, 256, 512)


def _with_policy(policy: str, build: Callable[[], keras.Model]) -> keras.Model:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(previous)


def _cnn() -> keras.Model:
    layers = keras.layers
    image = x = keras.Input((SIDE, SIDE, 3))
    for filters in FILTERS[:3]:
        x = layers.Conv2D(filters, 3, padding="same", activation="gelu")(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(CLASSES, dtype="float32")(x))


def _resnet() -> keras.Model:
    layers = keras.layers

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


def _transformer() -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, "gelu")(y)
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(WORDS, dtype="float32")(x))


@functools.cache
def _images() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2048, SIDE, SIDE, 3)).astype("float32")
    return x, draw.integers(0, CLASSES, len(x)).astype("int32")


@functools.cache
def _tokens() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, WORDS, (1024, LENGTH + 1))
    tokens = tokens.astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def _case(
    name: str,
    policy: str,
    build: Callable[[], keras.Model],
    load: Callable[[], tuple[np.ndarray, np.ndarray]],
    batch: int,
) -> Case:
    rows = batch // 8 if REHEARSAL else batch
    return Case(name, functools.partial(_with_policy, policy, build), load, rows)


# To be compared with one device.
EXACT = "CNN, float32"
TRANSFORMER = "transformer, float32"
HALF = "transformer, bfloat16, half a batch"
TIMED = ("transformer, bfloat16", "ResNet, bfloat16", "CNN, bfloat16")
CASES = (
    _case(EXACT, "float32", _cnn, _images, 512),
    _case(TRANSFORMER, "float32", _transformer, _tokens, 16),
    _case(HALF, "mixed_bfloat16", _transformer, _tokens, 16),
    _case(TIMED[0], "mixed_bfloat16", _transformer, _tokens, 32),
    _case(TIMED[1], "mixed_bfloat16", _resnet, _images, 256),
    _case(TIMED[2], "mixed_bfloat16", _cnn, _images, 512),
)
