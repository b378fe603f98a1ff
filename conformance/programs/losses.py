"""Losses, their reductions and weights, masks, and what layers add to a loss."""

import keras
from keras import layers, losses, ops

from conformance import models
from conformance.models import AddLoss, classifier, mlp, regressor, tagger, with_sgd
from conformance.program import program, programs


def _of_classes(loss, optimizer=None):
    """Return a compiled MLP of three outputs, whatever they mean to the loss."""
    return with_sgd(mlp(outputs=models.CLASSES), optimizer, loss)


def _contrastive(y, y_pred):
    """Compare rows, and return a number for each of them."""
    rows = models.normalized(y_pred)
    labels = ops.reshape(y, (-1, 1))
    same = ops.cast(ops.equal(labels, ops.transpose(labels)), rows.dtype)
    similarity = ops.matmul(rows, ops.transpose(rows)) / 0.5
    log_p = similarity - ops.logsumexp(similarity, axis=1, keepdims=True)
    return -ops.sum(same * log_p, axis=1) / ops.sum(same, axis=1)


programs(
    models.regression,
    mean_squared_error=lambda: regressor(),
    reduction_sum=lambda: regressor(
        optimizer=keras.optimizers.SGD(0.005),
        loss=losses.MeanSquaredError(reduction="sum"),
    ),
    scalar_loss_function=lambda: regressor(
        loss=lambda y, y_pred: ops.mean(ops.abs(y - y_pred))
    ),
    # A number that is no mean over rows.
    concordance_of_the_batch=lambda: regressor(loss=models.concordance_loss),
    add_loss_of_a_mean=lambda: regressor(AddLoss()),
    add_loss_of_a_sum=lambda: regressor(
        AddLoss(lambda x: 0.01 * ops.sum(ops.square(x)))
    ),
    activity_regularizer=lambda: regressor(layers.Dense(8, activity_regularizer="l2")),
    kernel_regularizer=lambda: regressor(
        layers.Dense(8, kernel_regularizer="l1", bias_regularizer="l2")
    ),
)
programs(
    models.weighted_regression,
    sample_weight=lambda: regressor(),
    reduction_mean_with_sample_weight=lambda: regressor(
        loss=losses.MeanSquaredError(reduction="mean_with_sample_weight")
    ),
)
programs(
    models.classes,
    sparse_categorical_crossentropy=lambda: classifier(),
    # Rows of a batch are compared with each other.
    circle=lambda: _of_classes(losses.Circle(), keras.optimizers.SGD(0.001)),
    contrastive_loss_for_each_row=lambda: _of_classes(_contrastive),
)
programs(
    models.words,
    mask_of_an_embedding=lambda: tagger(_masked_embedding()),
    mask_mean_with_sample_weight=lambda: tagger(
        _masked_embedding(),
        loss=losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
    ),
)


def _masked_embedding():
    return layers.Embedding(models.WORDS, 4, mask_zero=True)


@program(models.classes, class_weight={0: 1.0, 1: 0.5, 2: 3.0})
def class_weight():
    return classifier()


@program(models.one_hot)
def dice():
    loss = losses.Dice()
    return _of_classes(lambda y, y_pred: loss(y, ops.sigmoid(y_pred)))


@program(models.labels)
def ctc():
    return tagger(layers.Embedding(models.WORDS, 4), loss=losses.CTC())


@program(models.two_targets)
def two_outputs_with_loss_weights():
    return with_sgd(
        models.two_outputs(),
        loss={"p": "mse", "q": "mae"},
        loss_weights={"p": 1.0, "q": 0.5},
    )
