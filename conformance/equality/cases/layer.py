"""Layers with state or statistics, and ordinary ones."""

import functools
from collections.abc import Iterator

import keras
import numpy as np
from keras import layers, optimizers

import keras_strategy as ks
from conformance import models
from conformance.equality.cases.case import Case, in_mlp, tagger
from conformance.models import compiled

EMBEDDING = functools.partial(layers.Embedding, models.WORDS, 4)


def cases() -> Iterator[Case]:
    """Yield normalizations and layers with state."""

    def steps(*middle):
        return in_mlp(lambda: layers.Reshape((4, 2)), *middle)

    def masked(make):
        return {
            "make": lambda: compiled(models.masked_steps(make)),
            "data": models.steps,
        }

    yield Case("BatchNormalization, synchronized", in_mlp(_synchronized))
    yield Case("BatchNormalization, synchronized, with a mask", **masked(_synchronized))
    yield Case("BatchNormalization", in_mlp(layers.BatchNormalization))
    yield Case("BatchNormalization, with a mask", **masked(layers.BatchNormalization))
    yield Case(
        "BatchNormalization twice, with renorm",
        in_mlp(
            lambda: layers.BatchNormalization(**models.RENORM),
            lambda: layers.Dense(6, "tanh"),
            lambda: layers.BatchNormalization(momentum=0.5),
        ),
    )
    yield Case("LayerNormalization", in_mlp(layers.LayerNormalization))
    yield Case("GroupNormalization", in_mlp(lambda: layers.GroupNormalization(2)))
    yield Case("RMSNormalization", in_mlp(layers.RMSNormalization))
    yield Case("UnitNormalization", in_mlp(layers.UnitNormalization))
    yield Case("Normalization, adapted", in_mlp(_adapted_normalization))
    yield Case(
        "Discretization, adapted",
        in_mlp(_adapted_discretization, lambda: layers.CategoryEncoding(4, "count")),
    )
    yield Case(
        "StringLookup, adapted",
        lambda: compiled(
            _of_strings(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        data=_strings,
        not_on=dict.fromkeys(("jax", "torch"), "Keras's models take no strings there"),
    )
    yield Case(
        "SpectralNormalization",
        in_mlp(lambda: layers.SpectralNormalization(layers.Dense(8))),
    )
    yield Case("LoRA", lambda: compiled(models.with_lora()))
    yield Case(
        "Embedding (sparse gradients on TensorFlow)", tagger(EMBEDDING), models.words
    )
    accumulated = {"clipnorm": 0.1, "gradient_accumulation_steps": 2}
    yield Case(
        "Embedding, clipped and accumulated",
        tagger(EMBEDDING, lambda: optimizers.Adam(0.01, **accumulated)),
        models.words,
    )
    convolution = functools.partial(layers.Conv1D, 4, 2, activation="relu")
    yield Case("convolutions", steps(convolution, layers.Flatten))
    yield Case(
        "recurrent layers",
        steps(
            lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            lambda: layers.GRU(4),
        ),
    )
    yield Case("attention", steps(_SelfAttention, layers.Flatten))


class _SelfAttention(layers.Layer):
    def build(self, shape):
        # The bias of the keys has no gradient but rounding noise.
        self.attention = layers.MultiHeadAttention(2, 2, use_bias=False)
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def _synchronized():
    # On one device there is nothing to synchronize, and Keras refuses to.
    return layers.BatchNormalization(synchronized=ks.has_strategy())


def _adapted_normalization():
    layer = layers.Normalization()
    layer.adapt(np.repeat(models.regression(64)[0], 2, axis=1))
    return layer


def _adapted_discretization():
    layer = layers.Discretization(num_bins=4)
    layer.adapt(np.linspace(-1, 1, 64, dtype="float32"))
    return layer


def _strings(rows):
    x, y = models.words(rows)
    names = np.array(["none", "one", "two", "three", "four", "five", "six"])[x]
    # Keras takes no arrays of strings, but TensorFlow's tensors of them.
    return keras.ops.convert_to_tensor(names, dtype="string"), y


def _of_strings():
    lookup = layers.StringLookup(max_tokens=models.WORDS)
    lookup.adapt(["one", "two", "three", "three", "four", "four"])
    return keras.Sequential(
        [
            keras.Input((models.STEPS,), dtype="string"),
            lookup,
            EMBEDDING(),
            layers.Dense(models.CLASSES),
        ]
    )
