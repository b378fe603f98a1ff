"""Data, and what `fit` does around the steps."""

import keras

from conformance import models
from conformance.models import regressor
from conformance.program import program


@program(models.regression, rows=25)
def last_batch_of_one_row():
    return regressor()


@program(models.regression, rows=7)
def fewer_rows_than_a_batch():
    return regressor()


@program(models.regression, batch_size=8, rows=36)
def batch_that_three_do_not_divide():
    return regressor()


@program(models.classes, validation=23)
def validation_data():
    return models.classifier(metrics=["accuracy"])


@program(models.regression, validation=23)
def validation_with_batch_norm():
    return regressor(keras.layers.BatchNormalization(momentum=0.5))


@program(
    models.regression,
    epochs=4,
    callbacks=lambda: [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    ],
    needs_fit="callbacks belong to fit",
)
def callbacks_that_read_logs():
    return regressor()
