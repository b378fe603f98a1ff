"""Activity regularizers, where Keras adds them up over the rows of a batch.

Since 3.14 Keras divides them by the rows. The optimizer weights a replica's loss by its
rows, which is right for a mean over them; of a sum it would take a part only.
"""

from typing import Any

import keras
from keras import ops

from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import changed

_NAME = "activity_regularizer"


def hooks() -> list[Any]:
    """What makes a replica's activity losses add up to those of one device."""
    return [_OfAllRows()] if _is_a_sum() else []


def _is_a_sum() -> bool:
    # Asked of a layer of two rows: nothing that can be read off a class tells.
    layer = keras.layers.Identity(activity_regularizer=ops.sum, name="two_rows")
    layer(ops.ones((2, 1)))
    return float(layer.losses[0]) == 2.0


class _OfAllRows:
    """`Layer.activity_regularizer`: in a replica, one whose sum is not weighted."""

    def check(self) -> None:
        """Raises `KerasVersionError` unless the attribute is each layer's own."""
        found = getattr(keras.Layer, _NAME, None)
        if found is not None and getattr(found, "fget", None) is not _get:
            raise changed(f"Layer.{_NAME}", "became a property")

    def install(self) -> None:
        """Puts a property in the attribute's place."""
        setattr(keras.Layer, _NAME, property(_get, _set))


def _get(layer: Any) -> Any:
    if _NAME not in vars(layer):
        raise AttributeError(f"{type(layer).__name__} has no {_NAME} yet")
    regularizer = vars(layer)[_NAME]
    replica = distributed_replica()
    weight = None if replica is None else replica.step.row_weight
    if regularizer is None or weight is None:
        return regularizer

    def unweighted(outputs):
        loss = regularizer(outputs)
        return ops.divide_no_nan(loss, ops.cast(weight, loss.dtype))

    return unweighted


def _set(layer: Any, regularizer: Any) -> None:
    vars(layer)[_NAME] = regularizer
