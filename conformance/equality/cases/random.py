"""Layers that draw random numbers, with a seed and without."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import layers

from conformance import models
from conformance.equality.cases.case import Case, in_mlp
from conformance.models import compiled

Made = Callable[[Any], layers.Layer]

SIZE = 8
_UNIT: dict[str, Any] = {"value_range": (0, 1)}

# Of a seed, what is put into an MLP of 8 features.
NOISE: dict[str, Made] = {
    "Dropout": lambda seed: layers.Dropout(0.3, seed=seed),
    "Dropout, one for each row": lambda seed: layers.Dropout(0.3, (None, 1), seed=seed),
    "Dropout, one for all rows": lambda seed: layers.Dropout(0.3, (1, 8), seed=seed),
    "AlphaDropout": lambda seed: layers.AlphaDropout(0.2, seed=seed),
    "GaussianDropout": lambda seed: layers.GaussianDropout(0.2, seed=seed),
    "GaussianNoise": lambda seed: layers.GaussianNoise(0.2, seed=seed),
}
# The bias of the keys has no gradient but rounding noise.
_ATTENTION: dict[str, Any] = {"dropout": 0.3, "use_bias": False}

# What is put into a model of 4 steps of 2 features, and gives as many steps.
STEPS: dict[str, Made] = {
    "SpatialDropout1D": lambda seed: layers.SpatialDropout1D(0.3, seed=seed),
    "SpatialDropout2D": lambda seed: _shaped(
        (2, 2, 2), layers.SpatialDropout2D(0.3, seed=seed)
    ),
    "SpatialDropout3D": lambda seed: _shaped(
        (2, 2, 1, 2), layers.SpatialDropout3D(0.3, seed=seed)
    ),
    **{
        f"dropout of {cls.__name__}": lambda seed, cls=cls: cls(2, **_recurrent(seed))
        for cls in (layers.LSTM, layers.GRU, layers.SimpleRNN)
    },
    **{
        f"dropout of {cls.__name__}": lambda seed, cls=cls, shape=shape: _shaped(
            shape, cls(1, 2, padding="same", **_recurrent(seed))
        )
        for cls, shape in (
            (layers.ConvLSTM1D, (2, 4, 1)),
            (layers.ConvLSTM2D, (2, 2, 2, 1)),
            (layers.ConvLSTM3D, (2, 2, 2, 1, 1)),
        )
    },
    "dropout of Bidirectional": lambda seed: layers.Bidirectional(
        layers.GRU(1, **_recurrent(seed))
    ),
    "dropout of StackedRNNCells": lambda seed: layers.RNN(
        [cell(2, dropout=0.2, seed=seed) for cell in (layers.LSTMCell, layers.GRUCell)],
        return_sequences=True,
    ),
    "dropout of MultiHeadAttention": lambda seed: _to_each_other(
        layers.MultiHeadAttention(2, 2, **_ATTENTION, seed=seed)
    ),
    "dropout of GroupQueryAttention": lambda seed: _to_each_other(
        layers.GroupQueryAttention(2, 2, 1, **_ATTENTION, seed=seed)
    ),
    **{
        f"dropout of {cls.__name__}": lambda seed, cls=cls: _to_each_other(
            cls(dropout=0.3, seed=seed), at_once=True
        )
        for cls in (layers.Attention, layers.AdditiveAttention)
    },
    "Dropout in TimeDistributed": lambda seed: _in_time(
        layers.Dense(2), layers.Dropout(0.3, seed=seed)
    ),
    "Dropout in LSTM in TimeDistributed": lambda seed: _shaped(
        (2, 2, 2),
        _in_time(layers.LSTM(2, **_recurrent(seed)), layers.Dropout(0.3, seed=seed)),
    ),
}

# What is not in the small form of the table.
_SLOW = {"jax": "half a minute to compile; `fit` is one program, whatever it draws"}
_BRIEFLY = (
    "SpatialDropout1D",
    "dropout of SimpleRNN",
    "dropout of MultiHeadAttention",
    "Dropout in TimeDistributed",
)

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
        "AugMix": _UNIT,
    }.items()
}


class _Equalizes(layers.Layer):
    """Keras's layer gives its symbolic input back, so that models leave it out."""

    def __init__(self):
        super().__init__()
        # Few bins, since JAX makes a program of each.
        self.layer = layers.Equalization(bins=8, **_UNIT)

    def call(self, x):
        return self.layer(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)


IMAGES["Equalization"] = lambda seed: _Equalizes()  # which draws nothing
# Its bins are exact of the images as they are, so it comes first.
_ACROSS = ("Equalization", "MixUp", "CutMix", "RandAugment")
_ELASTIC, _CHAINS = "RandomElasticTransform", "AugMix"


def _recurrent(seed: Any) -> dict[str, Any]:
    """Arguments of a recurrent layer that drops some of what it gets and keeps."""
    share = {"dropout": 0.2, "recurrent_dropout": 0.2, "seed": seed}
    return {**share, "return_sequences": True}


def _shaped(shape: tuple[int, ...], layer: layers.Layer) -> layers.Layer:
    """Return a layer that reshapes steps for another, and its result back."""
    return keras.Sequential([layers.Reshape(shape), layer, layers.Reshape((4, 2))])


def _in_time(*parts: layers.Layer) -> layers.Layer:
    return layers.TimeDistributed(keras.Sequential(parts))


def _to_each_other(attention: layers.Layer, at_once: bool = False) -> layers.Layer:
    """Return a model of steps that attend to each other, with dropout."""
    x = keras.Input((4, 2))
    return keras.Model(x, attention([x, x]) if at_once else attention(x, x))


def each() -> Iterator[Case]:
    """Yield a row for each layer, with a seed and without."""
    for seed in (7, None):
        told = "" if seed else ", no seed"
        for name, make in NOISE.items():
            yield _noisy(f"{name}{told}", [make], [seed])
        for name, make in STEPS.items():
            yield _stepwise(f"{name}{told}", [make], [seed])
        for name, make in IMAGES.items():
            yield _of_images(f"{name}{told}", [make], seed)


def at_once() -> Iterator[Case]:
    """All layers in some rows."""
    across = [IMAGES[name] for name in _ACROSS]
    apart = (*_ACROSS, _ELASTIC, _CHAINS)
    alone = [make for name, make in IMAGES.items() if name not in apart]
    noise = [*NOISE.values()] * 2
    yield _noisy("Dropout and noise", noise, [7] * len(NOISE) + [None] * len(NOISE))
    # Recurrent layers drop in one way, and each takes seconds to compile.
    steps = [STEPS[name] for name in _BRIEFLY]
    yield _stepwise("dropout of steps", steps, [None, 7, None, 7])
    rest = {
        "augmentation": (alone, 7),
        "augmentation across rows, no seed": (across, None),
        f"{_ELASTIC}, no seed": ([IMAGES[_ELASTIC]], None),
    }
    for name, (makes, seed) in rest.items():
        case = _of_images(name, makes, seed)
        yield dataclasses.replace(case, not_on={**_SLOW, **case.not_on})


def _made(makes: list[Made], seeds: list[Any]) -> list[Callable[[], layers.Layer]]:
    pairs = zip(makes, seeds, strict=True)
    return [functools.partial(make, seed) for make, seed in pairs]


def _noisy(name: str, makes: list[Made], seeds: list[Any]) -> Case:
    return Case(name, in_mlp(*_made(makes, seeds)))


def _stepwise(name: str, makes: list[Made], seeds: list[Any]) -> Case:
    middle = _made(makes, seeds)
    return Case(name, in_mlp(lambda: layers.Reshape((4, 2)), *middle, layers.Flatten))


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
        data=functools.partial(models.images, channels=3),
        not_on=reasons if elastic else {},
    )
