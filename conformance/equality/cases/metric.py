"""Metrics that Keras ships, and custom ones."""

import functools
from collections.abc import Iterator
from typing import Any

import keras
from keras import layers, losses, metrics, ops

import keras_strategy as ks
from conformance import models
from conformance.equality.cases.case import Case, shipped
from conformance.models import compiled

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
# It wants a weight for each entry, and Keras's fit has them for rows.
_UNWEIGHTED = {metrics.BinaryIoU}
# They make whole numbers of the weights, so that most rows count for nothing.
_WHOLE_WEIGHTS = {
    metrics.IoU,
    metrics.MeanIoU,
    metrics.OneHotIoU,
    metrics.OneHotMeanIoU,
}


class Largest(keras.metrics.Metric):
    """The largest absolute target. Replicas look at each other's, and hold the same.

    A maximum is no sum of the replicas' parts, so it is not left to be added up.
    """

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable(
            (), "zeros", aggregation="only_first_replica", name="largest"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = ops.max(ops.abs(ops.cast(y_true, self.dtype)), keepdims=True)
        replica = ks.get_replica_context()
        if replica is not None:  # else all rows are here
            largest = replica.all_gather(ops.reshape(largest, (1,)), axis=0)
        self.largest.assign(ops.maximum(self.largest, ops.max(largest)))

    def result(self):
        return ops.cast(self.largest, self.dtype)


class Choice(layers.Layer):
    """The most probable class."""

    def call(self, x):
        return ops.argmax(x, axis=-1)


class OwnMetrics(keras.Model):
    """A model that updates metrics of values itself."""

    def __init__(self):
        super().__init__()
        self.body = models.mlp()
        self.rows = keras.metrics.Mean(name="mean of rows")
        self.scalar = keras.metrics.Mean(name="mean of a scalar")
        self.total = keras.metrics.Sum(name="sum")

    def call(self, x):
        return self.body(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        error = ops.abs(y - y_pred)
        self.rows.update_state(error)
        self.scalar.update_state(ops.mean(error))
        self.total.update_state(error)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def each() -> Iterator[Case]:
    """Every metric class that Keras ships, in trainings that share them."""
    makers = _makers()
    yield Case(f"{len(makers)} metrics", lambda: _measured(makers, []), _targets)
    weighted = [make for make in makers if make.func not in _UNWEIGHTED]
    yield Case(
        f"{len(weighted)} metrics, sample weights",
        lambda: _measured([], weighted),
        _targets,
        fit=_weights,
    )


def at_once() -> Iterator[Case]:
    """All of them in one training: the one half with sample weights."""
    makers = _makers()
    plain = _UNWEIGHTED | _WHOLE_WEIGHTS
    weighted = [make for make in makers[::2] if make.func not in plain]
    others = [make for make in makers if make not in weighted]
    yield Case(
        f"{len(makers)} metrics, half of them with sample weights",
        lambda: _measured(others, weighted),
        _targets,
        fit=_weights,
    )


def _makers():
    return [
        functools.partial(
            cls, name=f"m_{cls.__name__.lower()}", **_ARGUMENTS.get(cls.__name__, {})
        )
        for cls in shipped(metrics, metrics.Metric, _OF_VALUES)
    ]


def _measured(plain, weighted):
    """Return a model with the metrics that functions make."""
    inputs = keras.Input((models.FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    softmax = layers.Dense(models.CLASSES, "softmax")(hidden)
    outputs = {
        name: layers.Identity(name=name)(softmax) for name in ("onehot", "sparse")
    }
    outputs["predicted"] = Choice(name="predicted")(softmax)

    def by_output(makers):
        made: dict[str, list[Any]] = {name: [] for name in outputs}
        for make in makers:
            made[_OUTPUTS.get(make.func.__name__, "onehot")].append(make())
        return made

    return compiled(
        keras.Model(inputs, outputs),
        loss={
            "onehot": "categorical_crossentropy",
            "sparse": "sparse_categorical_crossentropy",
            "predicted": None,
        },
        metrics=by_output(plain),
        weighted_metrics=by_output(weighted),
    )


def _targets(rows):
    x, y = models.classes(rows)
    one_hot = keras.utils.to_categorical(y, models.CLASSES)
    return x, {"onehot": one_hot, "sparse": y, "predicted": y}


def _weights(rows):
    outputs = ("onehot", "sparse", "predicted")
    return {"sample_weight": dict.fromkeys(outputs, models.weights_of(rows))}


def cases() -> Iterator[Case]:
    """Yield metrics of values, and custom metrics."""
    yield Case("Mean and Sum, of rows and of scalars", lambda: compiled(OwnMetrics()))
    yield Case(
        "custom metrics: a sum, and a maximum that gathers",
        lambda: compiled(metrics=[models.Total(), Largest()]),
    )
