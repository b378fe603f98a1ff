"""Metrics: those that Keras ships, and ones of a user's own."""

import functools
from collections.abc import Iterator
from typing import Any

import keras
from keras import layers, losses, metrics

from keras_strategy.testing.equality import models
from keras_strategy.testing.equality.cases.case import Case, shipped
from keras_strategy.testing.equality.models import compiled

# Metrics whose constructor needs arguments, or whose targets are whole numbers.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.4},
    "IoU": {"num_classes": models.CLASSES, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": models.CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": models.CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": models.CLASSES},
    "MeanMetricWrapper": {"fn": losses.mean_absolute_error},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
# Which output and targets a metric is for, unless probabilities and one-hot targets.
_OUTPUTS = {
    "MeanIoU": "sparse",
    "SparseCategoricalAccuracy": "sparse",
    "SparseCategoricalCrossentropy": "sparse",
    "SparseTopKCategoricalAccuracy": "sparse",
    "Accuracy": "predicted",
    "IoU": "predicted",
}
# Metrics of a value rather than of targets and predictions.
_OF_VALUES = {"Mean", "Sum"}


def cases() -> Iterator[Case]:
    """Every metric class that Keras ships, in trainings that share them."""
    by_output: dict[str, list[Any]] = {"onehot": [], "sparse": [], "predicted": []}

    def add(output, cls, name):
        by_output[output].append(
            functools.partial(cls, name=name, **_ARGUMENTS.get(cls.__name__, {}))
        )

    for cls in shipped(metrics, metrics.Metric, _OF_VALUES):
        add(_OUTPUTS.get(cls.__name__, "onehot"), cls, f"m_{cls.__name__.lower()}")

    def make(kind, without=()):
        inputs = keras.Input((models.FEATURES,))
        hidden = layers.Dense(8, "tanh")(inputs)
        softmax = layers.Dense(models.CLASSES, "softmax")(hidden)
        outputs = {
            name: layers.Identity(name=name)(softmax) for name in ("onehot", "sparse")
        }
        outputs["predicted"] = models.Choice(name="predicted")(softmax)
        return compiled(
            keras.Model(inputs, outputs),
            loss={
                "onehot": "categorical_crossentropy",
                "sparse": "sparse_categorical_crossentropy",
                "predicted": None,
            },
            **{
                kind: {
                    name: [make() for make in makers if make.func not in without]
                    for name, makers in by_output.items()
                }
            },
        )

    def data(rows):
        x, y = models.classes(rows)
        one_hot = keras.utils.to_categorical(y, models.CLASSES)
        return x, {"onehot": one_hot, "sparse": y, "predicted": y}

    # It wants a weight for each entry, and Keras's fit has them for rows.
    unweighted = {metrics.BinaryIoU}
    count = sum(len(makers) for makers in by_output.values())
    yield Case(f"{count} metrics", lambda: make("metrics"), data)
    yield Case(
        f"{count - len(unweighted)} metrics, sample weights",
        lambda: make("weighted_metrics", unweighted),
        data,
        fit=lambda rows: {
            "sample_weight": dict.fromkeys(by_output, models.weights_of(rows))
        },
    )
    yield Case(
        "Mean and Sum, of rows and of scalars", lambda: compiled(models.OwnMetrics())
    )
    yield Case(
        "metrics of one's own: a sum, and a maximum that gathers",
        lambda: compiled(metrics=[models.Total(), models.Largest()]),
    )
