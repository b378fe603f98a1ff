"""Where augmentation looks at the rows of a batch beside each other."""

import random
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun
from keras_strategy.hooks.draws import drawing_for_all, of_own_rows
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.rules import draws
from keras_strategy.rules.draws import BatchDim

_BACKEND = f"keras.src.backend.{keras.backend.backend()}"
keras_image = home_of("elastic_transform", f"{_BACKEND}.image", f"{_BACKEND}.ops.image")


@hook(keras.layers.MixUp, "call", "(self, data, training=True)", when=of_own_rows)
@hook(keras.layers.CutMix, "call", "(self, data, training=True)", when=of_own_rows)
def _mixed(original, at, self, data, training=True):
    """Rows are mixed with rows of all replicas, which are gathered."""
    images = data["images"] if isinstance(data, dict) else data
    if isinstance(at, DryRun) or len(ops.shape(images)) < 4:
        return original(self, data, training=training)
    if not training:
        with drawing_for_all(at):  # what is not used
            return original(self, data, training=training)
    data = _of_all_rows(at, data)
    with drawing_for_all(at):
        return _own(at, original(self, data, training=training))


@dataclass(frozen=True)
class _Chance:
    """Where Python's `random` is."""

    state: Any


@hook(keras.layers.AugMix, "call", "(self, data, training=True)", when=of_own_rows)
def _chained(original, at, self, data, training=True):
    """Replicas choose the same chains, and make those of all rows, which are gathered.

    Python's `random` chooses: each replica begins where one device would, and leaves it
    where one device would.
    """
    images = data["images"] if isinstance(data, dict) else data
    if isinstance(at, DryRun) or not training or len(ops.shape(images)) < 4:
        return original(self, data, training=training)
    chance = at.merge_call(lambda strategy: _Chance(random.getstate()), (), {})
    data = _of_all_rows(at, data)
    random.setstate(chance.state)
    with drawing_for_all(at):
        return _own(at, original(self, data, training=training))


@hook(
    keras.layers.Equalization,
    "transform_images",
    "(self, images, transformation, training=True)",
    when=of_own_rows,
)
def _equalized(original, at, self, images, *args, **kwargs):
    """All rows make one histogram."""
    if isinstance(at, DryRun) or len(ops.shape(images)) < 4:
        return original(self, images, *args, **kwargs)
    return _own(at, original(self, _of_all_rows(at, images), *args, **kwargs))


@hook(
    keras_image,
    "elastic_transform",
    ("images",),
    when=of_own_rows,
    owner_name="keras.ops.image",
)
def _elastic(original, at, images, *args, **kwargs):
    """It draws by itself, on torch from the process's generator."""
    images = ops.convert_to_tensor(images)
    if isinstance(at, DryRun) or len(images.shape) < 4:
        return original(images, *args, **kwargs)
    images = _of_all_rows(at, images)

    def skip():
        """A seed is drawn on the other engines alone."""

    with drawing_for_all(at):
        whole = at.draw_once(
            "elastic_transform", lambda: original(images, *args, **kwargs), skip
        )
    if whole.shape[0] == 1:
        return whole  # where TensorFlow does not know the rows, Keras makes one of all
    return _own(at, whole)


def _of_all_rows(at: Any, structure: Any) -> Any:
    return tree.map_structure(
        lambda x: draws.gather_rows(at, ops.convert_to_tensor(x), 0), structure
    )


def _own(at: Any, structure: Any) -> Any:
    return tree.map_structure(
        lambda x: draws.local_slice(x, BatchDim(0), at.step.rows), structure
    )
