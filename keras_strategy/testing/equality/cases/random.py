"""Layers that draw random numbers, with a seed and without."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

from keras_strategy.testing.equality import models
from keras_strategy.testing.equality.cases.case import Case
from keras_strategy.testing.equality.models import compiled, mlp

Made = Callable[[Any], layers.Layer]

SIZE = 8
_UNIT: dict[str, Any] = {"value_range": (0, 1)}

# Of a seed, what is put into an MLP of 8 features.
NOISE: dict[str, Made] = {
    "Dropout": lambda seed: layers.Dropout(0.3, seed=seed),
    "Dropout, one for each row": lambda seed: layers.Dropout(
        0.3, noise_shape=(None, 1), seed=seed
    ),
    "Dropout, one for all rows": lambda seed: layers.Dropout(
        0.3, noise_shape=(1, 8), seed=seed
    ),
    "AlphaDropout": lambda seed: layers.AlphaDropout(0.2, seed=seed),
    "GaussianDropout": lambda seed: layers.GaussianDropout(0.2, seed=seed),
    "GaussianNoise": lambda seed: layers.GaussianNoise(0.2, seed=seed),
}

# What is put into a model of 4 steps of 2 features, and gives as many steps.
STEPS: dict[str, Made] = {
    "SpatialDropout1D": lambda seed: layers.SpatialDropout1D(0.3, seed=seed),
    "dropout of LSTM": lambda seed: layers.LSTM(
        2, dropout=0.2, recurrent_dropout=0.2, return_sequences=True, seed=seed
    ),
    "dropout of GRU": lambda seed: layers.GRU(
        2, dropout=0.2, recurrent_dropout=0.2, return_sequences=True, seed=seed
    ),
    "dropout of SimpleRNN": lambda seed: layers.SimpleRNN(
        2, dropout=0.2, recurrent_dropout=0.2, return_sequences=True, seed=seed
    ),
    "dropout of MultiHeadAttention": lambda seed: SelfAttention(seed),
    "Dropout in TimeDistributed": lambda seed: layers.TimeDistributed(
        keras.Sequential([layers.Dense(2), layers.Dropout(0.3, seed=seed)])
    ),
}

# What is put before a model of images.
IMAGES: dict[str, Made] = {
    name: lambda seed, name=name, given=given: getattr(layers, name)(**given, seed=seed)
    for name, given in {
        "RandomBrightness": {"factor": 0.3, **_UNIT},
        "RandomColorDegeneration": {"factor": 0.5},
        "RandomColorJitter": {
            **{f"{of}_factor": 0.3 for of in ["brightness", "contrast", "hue"]},
            **_UNIT,
        },
        "RandomContrast": {"factor": 0.4, **_UNIT},
        "RandomCrop": {"height": SIZE, "width": SIZE},
        "RandomErasing": {"factor": 1.0, **_UNIT},
        "RandomFlip": {},
        "RandomGaussianBlur": {"factor": 1.0, "kernel_size": 3, **_UNIT},
        "RandomGrayscale": {"factor": 0.5},
        "RandomHue": {"factor": 0.5, **_UNIT},
        "RandomInvert": {"factor": 0.5, **_UNIT},
        "RandomPerspective": {},
        "RandomPosterization": {"factor": 4, **_UNIT},
        "RandomRotation": {"factor": 0.3},
        "RandomSaturation": {"factor": 0.5, **_UNIT},
        "RandomSharpness": {"factor": 0.5, **_UNIT},
        "RandomShear": {"x_factor": 0.3, "y_factor": 0.3},
        "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
        "RandomZoom": {"height_factor": 0.3},
        "Solarization": {"addition_factor": 0.3, "threshold_factor": 0.5, **_UNIT},
        # These look at other rows, or draw by themselves.
        "MixUp": {},
        "CutMix": {},
        "RandomElasticTransform": {"factor": 1.0, **_UNIT},
        "RandAugment": _UNIT,
    }.items()
}
_ACROSS = ("MixUp", "CutMix", "RandAugment")
_ELASTIC = "RandomElasticTransform"


class SelfAttention(layers.Layer):
    """Attention of steps to each other, of which some are dropped."""

    def __init__(self, seed: Any):
        super().__init__()
        # The bias of the keys has no gradient but rounding noise.
        self.attention = layers.MultiHeadAttention(
            2, 2, dropout=0.3, use_bias=False, seed=seed
        )

    def build(self, shape):
        """Builds it for queries that are keys and values, too."""
        self.attention.build(shape, shape)

    def call(self, x, training=False):
        """Attends."""
        return self.attention(x, x, training=training)


def images(rows: int) -> tuple[Any, Any]:
    """Images of 8 by 8, and a class of 3."""
    rng = np.random.RandomState(6)
    x = rng.random_sample((rows, SIZE, SIZE, 3)).astype("float32")
    return x, rng.randint(0, models.CLASSES, rows)


def each() -> Iterator[Case]:
    """A row for each layer, with a seed and without."""
    for seed in (7, None):
        told = "" if seed else ", no seed"
        for name, make in NOISE.items():
            yield _noisy(f"{name}{told}", [make], seed)
        for name, make in STEPS.items():
            yield _stepwise(f"{name}{told}", [make], seed)
        for name, make in IMAGES.items():
            yield _of_images(f"{name}{told}", [make], seed)


def at_once() -> Iterator[Case]:
    """All layers in some rows."""
    across = [IMAGES[name] for name in _ACROSS]
    alone = [make for name, make in IMAGES.items() if name not in (*_ACROSS, _ELASTIC)]
    for seed in (7, None):
        told = "" if seed else ", no seed"
        yield _noisy(f"Dropout and noise{told}", list(NOISE.values()), seed)
        yield _stepwise(f"dropout of steps{told}", list(STEPS.values()), seed)
    yield _of_images("augmentation", alone, 7)
    yield _of_images("augmentation across rows, no seed", across, None)
    yield _of_images(f"{_ELASTIC}, no seed", [IMAGES[_ELASTIC]], None)


def _noisy(name: str, makes: list[Made], seed: Any) -> Case:
    middle = [lambda make=make: make(seed) for make in makes]
    return Case(name, lambda: compiled(mlp(*middle)))


def _stepwise(name: str, makes: list[Made], seed: Any) -> Case:
    def make():
        middle = [lambda make=make: make(seed) for make in makes]
        return compiled(mlp(lambda: layers.Reshape((4, 2)), *middle, layers.Flatten))

    return Case(name, make)


def _of_images(name: str, makes: list[Made], seed: Any) -> Case:
    def make():
        model = keras.Sequential(
            [
                keras.Input((SIZE, SIZE, 3)),
                *(made(seed) for made in makes),
                layers.Flatten(),
                layers.Dense(models.CLASSES, "softmax"),
            ]
        )
        return compiled(
            model, keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy"
        )

    elastic = any(made is IMAGES[_ELASTIC] for made in makes)
    reasons = {
        "tensorflow": "Keras transforms all rows alike where a step is compiled",
        "jax": "Keras's fails on one device",
    }
    return Case(
        name,
        make,
        data=images,
        not_on=reasons if elastic else {},
    )
