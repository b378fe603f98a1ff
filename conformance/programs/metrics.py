"""Metrics with state, of Keras's and of the user's."""

import keras
from keras import metrics, ops

from conformance import models
from conformance.models import mlp, with_sgd
from conformance.program import program


@program(models.classes)
def accuracy():
    return models.classifier(metrics=["accuracy"])


@program(models.binary)
def auc():
    return with_sgd(
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
    return with_sgd(
        mlp(),
        metrics=[
            metrics.Precision(0.2, name="precision"),
            metrics.Recall(0.2, name="recall"),
            metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
        ],
    )


@program(models.one_hot)
def f1_score():
    return with_sgd(
        mlp(outputs=models.CLASSES),
        metrics=[metrics.F1Score(average="macro", name="f1")],
    )


@program(models.regression)
def r2_score():
    return with_sgd(mlp(), metrics=[metrics.R2Score(name="r2")])


@program(models.regression)
def correlation_over_the_batch():
    correlation = metrics.PearsonCorrelation(axis=0, name="r")
    return with_sgd(mlp(), metrics=[metrics.RootMeanSquaredError(), correlation])


@program(models.weighted_classes)
def weighted_metrics():
    return models.classifier(metrics=["accuracy"], weighted_metrics=["accuracy"])


@program(models.regression)
def metric_function():
    def largest_error(y, y_pred):
        return ops.max(ops.abs(y - y_pred), axis=-1)

    return with_sgd(mlp(), metrics=[largest_error])


@program(models.regression)
def users_metric():
    return with_sgd(mlp(), metrics=[models.Total()])
