"""Metrics with state, of Keras's and of the user's."""

import keras
from keras import metrics, ops

from conformance import models
from conformance.models import classifier, mlp, regressor, with_sgd
from conformance.program import programs


def largest_error(y, y_pred):
    return ops.max(ops.abs(y - y_pred), axis=-1)


programs(
    models.classes,
    accuracy=lambda: classifier(metrics=["accuracy"]),
    mean_iou=lambda: classifier(
        metrics=[metrics.MeanIoU(models.CLASSES, sparse_y_pred=False, name="iou")]
    ),
)
programs(
    models.weighted_classes,
    weighted_metrics=lambda: classifier(
        metrics=["accuracy"], weighted_metrics=["accuracy"]
    ),
)
programs(
    models.binary,
    auc=lambda: regressor(
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[metrics.AUC(from_logits=True, name="auc")],
    ),
    precision_and_recall=lambda: regressor(
        metrics=[
            metrics.Precision(0.2, name="precision"),
            metrics.Recall(0.2, name="recall"),
            metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
        ],
    ),
)
programs(
    models.one_hot,
    f1_score=lambda: with_sgd(
        mlp(outputs=models.CLASSES),
        metrics=[metrics.F1Score(average="macro", name="f1")],
    ),
)
programs(
    models.regression,
    r2_score=lambda: regressor(metrics=[metrics.R2Score(name="r2")]),
    correlation_over_the_batch=lambda: regressor(
        metrics=[
            metrics.RootMeanSquaredError(),
            metrics.PearsonCorrelation(axis=0, name="r"),
        ]
    ),
    metric_function=lambda: regressor(metrics=[largest_error]),
    users_metric=lambda: regressor(metrics=[models.Total()]),
)
