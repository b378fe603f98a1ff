"""Metrics with state, of Keras's and of the user's."""

import keras
from keras import metrics, ops

from conformance import models
from conformance.models import compiled, mlp
from conformance.program import program


@program(models.classes)
def accuracy():
    return models.classifier(metrics=["accuracy"])


@program(models.binary)
def auc():
    return compiled(
        mlp(),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[metrics.AUC(from_logits=True, name="auc")],
    )


@program(models.classes)
def mean_iou():
    iou = metrics.MeanIoU(models.CLASSES, sparse_y_pred=False, name="iou")
    return models.classifier(metrics=[iou])


@program(models.binary)
def precision_and_recall():
    return compiled(
        mlp(),
        metrics=[
            metrics.Precision(0.2, name="precision"),
            metrics.Recall(0.2, name="recall"),
            metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
        ],
    )


@program(models.one_hot)
def f1_score():
    return compiled(
        mlp(outputs=models.CLASSES),
        metrics=[metrics.F1Score(average="macro", name="f1")],
    )


@program(models.regression)
def r2_score():
    return compiled(mlp(), metrics=[metrics.R2Score(name="r2")])


@program(models.regression)
def correlation_over_the_batch():
    correlation = metrics.PearsonCorrelation(axis=0, name="r")
    return compiled(mlp(), metrics=[metrics.RootMeanSquaredError(), correlation])


@program(models.weighted_classes)
def weighted_metrics():
    return models.classifier(metrics=["accuracy"], weighted_metrics=["accuracy"])


@program(models.regression)
def metric_function():
    def largest_error(y, y_pred):
        return ops.max(ops.abs(y - y_pred), axis=-1)

    return compiled(mlp(), metrics=[largest_error])


class Total(metrics.Metric):
    """Sum of the absolute targets."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(ops.cast(y_true, self.dtype))))

    def result(self):
        return ops.cast(self.total, self.dtype)


@program(models.regression)
def users_metric():
    return compiled(mlp(), metrics=[Total()])
