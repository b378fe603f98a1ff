"""Normalizations, layers that draw random numbers, and layers with state."""

import keras
from keras import layers, ops

from conformance import models
from conformance.models import Lambda, regressor
from conformance.program import programs


class Noise(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + 0.3 * keras.random.normal(ops.shape(x), seed=self.seeds)


class MovingMean(layers.Layer):
    """Subtract a moving mean of the batch's rows, which each call updates."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


def _standardized(x):
    return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1)


programs(
    models.regression,
    batch_norm=lambda: regressor(layers.BatchNormalization()),
    batch_norm_renorm=lambda: regressor(
        layers.BatchNormalization(renorm=True, momentum=0.8)
    ),
    layer_norm=lambda: regressor(layers.LayerNormalization()),
    spectral_norm=lambda: regressor(layers.SpectralNormalization(layers.Dense(8))),
    dropout=lambda: regressor(layers.Dropout(0.5, seed=3)),
    dropout_without_a_seed=lambda: regressor(layers.Dropout(0.5)),
    noise_of_a_users_layer=lambda: regressor(Noise()),
    moving_mean_of_a_users_layer=lambda: regressor(MovingMean()),
    lora=lambda: models.with_sgd(models.with_lora()),
    # Statistics of the batch, in a layer of the user's.
    standardization_over_the_batch=lambda: regressor(Lambda(_standardized)),
)
programs(
    models.images,
    batch_norm_of_a_convolution=lambda: models.image_classifier(
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
    ),
    spatial_dropout=lambda: models.image_classifier(
        layers.Conv2D(4, 3, activation="relu"),
        layers.SpatialDropout2D(0.5, seed=3),
        layers.Flatten(),
    ),
    random_flip_and_brightness=lambda: models.image_classifier(
        layers.RandomFlip("horizontal", seed=3),
        layers.RandomBrightness(0.2, value_range=(0, 1), seed=4),
        layers.Flatten(),
    ),
)
programs(
    models.steps,
    batch_norm_with_a_mask=lambda: models.with_sgd(
        models.masked_steps(layers.BatchNormalization())
    ),
)
programs(
    models.words, embedding=lambda: models.tagger(layers.Embedding(models.WORDS, 4))
)
