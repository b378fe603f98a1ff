"""Losses, their reductions, weights, masks and what layers add."""

import functools
from collections.abc import Iterator

import keras
import numpy as np
from keras import layers, losses, optimizers

from conformance.equality import models
from conformance.equality.cases.case import Case, shipped
from conformance.equality.models import compiled, mlp

# CTC has data of its own. The others compare the rows of a batch with each other.
_APART = {"CTC", "Circle", "Dice", "Tversky"}


def each() -> Iterator[Case]:
    """Every loss class that Keras ships."""
    classes = list(shipped(losses, losses.Loss, _APART))
    yield Case(
        f"{len(classes)} losses",
        lambda: compiled(
            models.softmax_outputs([cls.__name__ for cls in classes]),
            optimizers.SGD(0.01),
            {cls.__name__: cls() for cls in classes},
        ),
        data=functools.partial(_targets, classes),
    )
    for cls in (losses.Dice, losses.Tversky):
        yield Case(
            f"loss {cls.__name__}, of the batch as a whole",
            lambda cls=cls: compiled(
                keras.Sequential(
                    [mlp(outputs=models.CLASSES), layers.Activation("sigmoid")]
                ),
                loss=cls(),
            ),
            data=_one_hot,
        )
    yield Case(
        "loss Circle, which compares rows",
        lambda: compiled(mlp(outputs=models.CLASSES), loss=losses.Circle()),
        data=models.classes,
    )
    yield Case(
        "loss CTC",
        lambda: compiled(
            models.sequences(layers.Embedding(models.WORDS, 4)), loss=losses.CTC()
        ),
        data=_labels,
    )


def _targets(classes, rows):
    x, y = models.classes(rows)
    # Not 0, by which some divide.
    one_hot = 0.1 + 0.7 * keras.utils.to_categorical(y, models.CLASSES)
    names = [cls.__name__ for cls in classes]
    whole = {n for n in names if n.startswith("Sparse")}
    whole.add("CategoricalGeneralizedCrossEntropy")
    return x, {name: y if name in whole else one_hot for name in names}


def _one_hot(rows):
    x, y = models.classes(rows)
    return x, keras.utils.to_categorical(y, models.CLASSES)


def _labels(rows):
    x, y = models.words(rows)
    # The class 0 stands for none.
    return x, np.maximum(y[:, :2], 1)


def cases() -> Iterator[Case]:
    """Losses, their reductions, weights, masks and what layers add."""

    def weighted(rows):
        return {"sample_weight": models.weights_of(rows)}

    for reduction in ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"):
        yield Case(
            f"reduction {reduction}, sample weights",
            lambda reduction=reduction: compiled(
                optimizer=optimizers.SGD(0.01),
                loss=losses.MeanSquaredError(reduction=reduction),
            ),
            fit=weighted,
        )
    yield Case(
        "reduction none, reduced in compute_loss",
        lambda: compiled(models.OwnReduction(), loss=None),
    )
    yield Case(
        "loss function that returns a scalar",
        lambda: compiled(loss=lambda t, p: keras.ops.mean(keras.ops.abs(t - p))),
    )
    yield Case(
        "several outputs with loss weights",
        lambda: compiled(
            models.two_outputs(),
            loss={"p": "mse", "q": "mae"},
            loss_weights={"p": 1.0, "q": 0.5},
        ),
        data=_for_two_outputs,
    )
    yield Case(
        "class weights",
        lambda: compiled(
            mlp(outputs=models.CLASSES),
            loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        data=models.classes,
        fit=lambda rows: {"class_weight": {0: 1.0, 1: 0.5, 2: 3.0}},
    )
    yield Case(
        "scalar loss function of the batch as a whole, sample weights",
        lambda: compiled(loss=_disagreement),
        fit=weighted,
    )
    yield from _masks()
    yield Case("add_loss", lambda: compiled(mlp(models.AddedLoss)))
    yield Case(
        "activity regularizer",
        lambda: compiled(mlp(lambda: layers.Dense(8, activity_regularizer="l2"))),
    )
    yield Case(
        "kernel and bias regularizers",
        lambda: compiled(
            mlp(lambda: layers.Dense(8, kernel_regularizer="l1", bias_regularizer="l2"))
        ),
    )


def _disagreement(y_true, y_pred):
    """1 minus the concordance of all rows: no mean of anything that a row has."""
    ops = keras.ops
    mean_true, mean_pred = ops.mean(y_true), ops.mean(y_pred)
    shared = ops.mean((y_true - mean_true) * (y_pred - mean_pred))
    apart = ops.square(mean_true - mean_pred)
    return 1 - 2 * shared / (ops.var(y_true) + ops.var(y_pred) + apart + 0.1)


def _masks() -> Iterator[Case]:
    masked = functools.partial(layers.Embedding, models.WORDS, 4, mask_zero=True)
    yield Case(
        "mask of an Embedding",
        lambda: compiled(
            models.sequences(masked()),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        ),
        data=models.words,
    )
    yield Case(
        "mask and sample weights",
        lambda: compiled(
            models.sequences(masked()),
            loss="sparse_categorical_crossentropy",
            weighted_metrics=["accuracy"],
        ),
        data=models.words,
        fit=lambda rows: {"sample_weight": models.weights_of((rows, models.STEPS))},
        not_on={
            "torch": "Keras's loss scales the sample weights in place there, before "
            "its metrics see them: one device logs a wrong accuracy"
        },
    )
    for reduction in ("sum", "mean_with_sample_weight"):
        yield Case(
            f"mask, reduction {reduction}",
            lambda reduction=reduction: compiled(
                models.sequences(masked()),
                optimizers.SGD(0.01),
                losses.SparseCategoricalCrossentropy(reduction=reduction),
            ),
            data=models.words,
        )
    yield Case(
        "Masking",
        lambda: compiled(models.masked_steps()),
        data=models.steps,
    )


def _for_two_outputs(rows):
    x, y = models.regression(rows)
    return x, {"p": y, "q": y * 3}
