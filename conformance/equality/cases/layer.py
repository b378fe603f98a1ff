"""Layers with state or statistics, and ordinary ones."""

from collections.abc import Iterator

import keras
import numpy as np
from keras import layers, optimizers

import keras_strategy as ks
from conformance import models
from conformance.equality.cases.case import Case
from conformance.models import compiled, mlp


def cases() -> Iterator[Case]:
    """Yield normalizations and layers with state."""
    yield Case(
        "BatchNormalization, synchronized",
        # On one device there is nothing to synchronize, and Keras refuses to.
        lambda: compiled(
            mlp(lambda: layers.BatchNormalization(synchronized=_in_a_scope()))
        ),
    )
    yield Case(
        "BatchNormalization, synchronized, with a mask",
        lambda: compiled(
            models.masked_steps(
                lambda: layers.BatchNormalization(synchronized=_in_a_scope())
            )
        ),
        data=models.steps,
    )
    yield Case("BatchNormalization", lambda: compiled(mlp(layers.BatchNormalization)))
    yield Case(
        "BatchNormalization, with a mask",
        lambda: compiled(models.masked_steps(layers.BatchNormalization)),
        data=models.steps,
    )
    yield Case(
        "BatchNormalization twice, with renorm",
        lambda: compiled(
            mlp(
                lambda: layers.BatchNormalization(**models.RENORM),
                lambda: layers.Dense(6, "tanh"),
                lambda: layers.BatchNormalization(momentum=0.5),
            )
        ),
    )
    yield Case("LayerNormalization", lambda: compiled(mlp(layers.LayerNormalization)))
    yield Case(
        "GroupNormalization",
        lambda: compiled(mlp(lambda: layers.GroupNormalization(2))),
    )
    yield Case("RMSNormalization", lambda: compiled(mlp(layers.RMSNormalization)))
    yield Case("UnitNormalization", lambda: compiled(mlp(layers.UnitNormalization)))
    yield Case(
        "Normalization, adapted",
        lambda: compiled(mlp(_adapted_normalization)),
    )
    yield Case(
        "Discretization, adapted",
        lambda: compiled(
            mlp(_adapted_discretization, lambda: layers.CategoryEncoding(4, "count"))
        ),
    )
    yield Case(
        "StringLookup, adapted",
        lambda: compiled(
            _of_strings(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        data=_strings,
        not_on={
            engine: "Keras's models take no strings there"
            for engine in ("jax", "torch")
        },
    )
    yield Case(
        "SpectralNormalization",
        lambda: compiled(mlp(lambda: layers.SpectralNormalization(layers.Dense(8)))),
    )
    yield Case("LoRA", lambda: compiled(models.with_lora()))
    yield Case(
        "Embedding (sparse gradients on TensorFlow)",
        lambda: compiled(
            models.sequences(layers.Embedding(models.WORDS, 4)),
            loss="sparse_categorical_crossentropy",
        ),
        data=models.words,
    )
    yield Case(
        "Embedding, clipped and accumulated",
        lambda: compiled(
            models.sequences(layers.Embedding(models.WORDS, 4)),
            optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
            loss="sparse_categorical_crossentropy",
        ),
        data=models.words,
    )
    yield Case(
        "convolutions",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: layers.Conv1D(4, 2, activation="relu"),
                layers.Flatten,
            )
        ),
    )
    yield Case(
        "recurrent layers",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
                lambda: layers.GRU(4),
            )
        ),
    )
    yield Case(
        "attention",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: _SelfAttention(),
                layers.Flatten,
            )
        ),
    )


class _SelfAttention(layers.Layer):
    def build(self, shape):
        # The bias of the keys has no gradient but rounding noise.
        self.attention = layers.MultiHeadAttention(2, 2, use_bias=False)
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def _in_a_scope() -> bool:
    return ks.has_strategy()


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
            layers.Embedding(models.WORDS, 4),
            layers.Dense(models.CLASSES),
        ]
    )
