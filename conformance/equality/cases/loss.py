"""Losses, their reductions, weights, masks and what layers add."""

import functools
from collections.abc import Iterator

import keras
from keras import layers, losses, ops, optimizers

from conformance import models
from conformance.equality.cases.case import Case, in_mlp, shipped, tagger
from conformance.models import compiled, mlp

# CTC has data of its own. The others compare the rows of a batch with each other.
_APART = {"CTC", "Circle", "Dice", "Tversky"}


class OwnReduction(keras.Model):
    """A model whose own `compute_loss` reduces what a loss left unreduced."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.each = keras.losses.MeanSquaredError(reduction="none")

    def call(self, x):
        return self.body(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.mean(self.each(y, y_pred))


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
            data=models.one_hot,
        )
    yield Case(
        "loss Circle, which compares rows",
        lambda: compiled(mlp(outputs=models.CLASSES), loss=losses.Circle()),
        data=models.classes,
    )
    embedding = functools.partial(layers.Embedding, models.WORDS, 4)
    yield Case("loss CTC", tagger(embedding, loss=losses.CTC()), models.labels)


def _targets(classes, rows):
    x, y = models.classes(rows)
    # Not 0, by which some divide.
    one_hot = 0.1 + 0.7 * keras.utils.to_categorical(y, models.CLASSES)
    names = [cls.__name__ for cls in classes]
    whole = {n for n in names if n.startswith("Sparse")}
    whole.add("CategoricalGeneralizedCrossEntropy")
    return x, {name: y if name in whole else one_hot for name in names}


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
        lambda: compiled(OwnReduction(), loss=None),
    )
    yield Case(
        "loss function that returns a scalar",
        lambda: compiled(loss=lambda t, p: ops.mean(ops.abs(t - p))),
    )
    yield Case(
        "several outputs with loss weights",
        lambda: compiled(
            models.two_outputs(),
            loss={"p": "mse", "q": "mae"},
            loss_weights={"p": 1.0, "q": 0.5},
        ),
        data=models.two_targets,
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
        lambda: compiled(loss=models.concordance_loss),
        fit=weighted,
    )
    yield from _masks()
    yield Case("add_loss", in_mlp(models.AddLoss))
    dense = functools.partial(layers.Dense, 8)
    yield Case("activity regularizer", in_mlp(lambda: dense(activity_regularizer="l2")))
    yield Case(
        "kernel and bias regularizers",
        in_mlp(lambda: dense(kernel_regularizer="l1", bias_regularizer="l2")),
    )


def _masks() -> Iterator[Case]:
    masked = functools.partial(layers.Embedding, models.WORDS, 4, mask_zero=True)
    yield Case(
        "mask of an Embedding", tagger(masked, metrics=["accuracy"]), models.words
    )
    yield Case(
        "mask and sample weights",
        tagger(masked, weighted_metrics=["accuracy"]),
        models.words,
        fit=lambda rows: {"sample_weight": models.weights_of((rows, models.STEPS))},
        not_on={
            "torch": "Keras's loss scales the sample weights in place there, before "
            "its metrics see them: one device logs a wrong accuracy"
        },
    )
    for reduction in ("sum", "mean_with_sample_weight"):
        loss = losses.SparseCategoricalCrossentropy(reduction=reduction)
        yield Case(
            f"mask, reduction {reduction}",
            tagger(masked, lambda: optimizers.SGD(0.01), loss),
            models.words,
        )
    yield Case("Masking", lambda: compiled(models.masked_steps()), models.steps)
