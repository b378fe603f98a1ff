"""Losses, their reductions and weights, masks, and what layers add to a loss."""

import keras
from keras import layers, losses, ops

from conformance import models
from conformance.models import AddLoss, mlp, with_sgd
from conformance.program import program


@program(models.regression)
def mean_squared_error():
    return with_sgd(mlp())


@program(models.classes)
def sparse_categorical_crossentropy():
    return models.classifier()


@program(models.weighted_regression)
def sample_weight():
    return with_sgd(mlp())


@program(models.classes, class_weight={0: 1.0, 1: 0.5, 2: 3.0})
def class_weight():
    return models.classifier()


@program(models.regression)
def reduction_sum():
    return with_sgd(
        mlp(), keras.optimizers.SGD(0.005), losses.MeanSquaredError(reduction="sum")
    )


@program(models.weighted_regression)
def reduction_mean_with_sample_weight():
    return with_sgd(
        mlp(), loss=losses.MeanSquaredError(reduction="mean_with_sample_weight")
    )


@program(models.one_hot)
def dice():
    return with_sgd(mlp(outputs=models.CLASSES), loss=_after_sigmoid(losses.Dice()))


def _after_sigmoid(loss):
    return lambda y, y_pred: loss(y, ops.sigmoid(y_pred))


@program(models.classes)
def circle():
    """Compare the rows of a batch with each other, in a loss of Keras's."""
    return with_sgd(
        mlp(outputs=models.CLASSES), keras.optimizers.SGD(0.001), losses.Circle()
    )


@program(models.labels)
def ctc():
    return models.tagger(layers.Embedding(models.WORDS, 4), loss=losses.CTC())


@program(models.regression)
def scalar_loss_function():
    return with_sgd(mlp(), loss=lambda y, y_pred: ops.mean(ops.abs(y - y_pred)))


@program(models.regression)
def concordance_of_the_batch():
    """Compute a number that is no mean over rows, in a loss function."""
    return with_sgd(mlp(), loss=models.concordance_loss)


@program(models.classes)
def contrastive_loss_for_each_row():
    """Compare rows in a loss function that returns a number for each row."""

    def loss(y, y_pred):
        rows = models.normalized(y_pred)
        labels = ops.reshape(y, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), rows.dtype)
        similarity = ops.matmul(rows, ops.transpose(rows)) / 0.5
        log_p = similarity - ops.logsumexp(similarity, axis=1, keepdims=True)
        return -ops.sum(same * log_p, axis=1) / ops.sum(same, axis=1)

    return with_sgd(mlp(outputs=models.CLASSES), loss=loss)


@program(models.two_targets)
def two_outputs_with_loss_weights():
    return with_sgd(
        models.two_outputs(),
        loss={"p": "mse", "q": "mae"},
        loss_weights={"p": 1.0, "q": 0.5},
    )


@program(models.words)
def mask_of_an_embedding():
    return models.tagger(layers.Embedding(models.WORDS, 4, mask_zero=True))


@program(models.words)
def mask_mean_with_sample_weight():
    return models.tagger(
        layers.Embedding(models.WORDS, 4, mask_zero=True),
        loss=losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
    )


@program(models.regression)
def add_loss_of_a_mean():
    return with_sgd(mlp(AddLoss(lambda x: 0.1 * ops.mean(ops.square(x)))))


@program(models.regression)
def add_loss_of_a_sum():
    return with_sgd(mlp(AddLoss(lambda x: 0.01 * ops.sum(ops.square(x)))))


@program(models.regression)
def activity_regularizer():
    return with_sgd(mlp(layers.Dense(8, activity_regularizer="l2")))


@program(models.regression)
def kernel_regularizer():
    return with_sgd(
        mlp(layers.Dense(8, kernel_regularizer="l1", bias_regularizer="l2"))
    )
