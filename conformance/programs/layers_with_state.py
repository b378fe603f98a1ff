"""Normalizations, layers that draw random numbers, and layers with state."""

import keras
from keras import layers, ops

from conformance import models
from conformance.models import Lambda, mlp, with_sgd
from conformance.program import program


@program(models.regression)
def batch_norm():
    return with_sgd(mlp(layers.BatchNormalization()))


@program(models.regression)
def batch_norm_renorm():
    return with_sgd(mlp(layers.BatchNormalization(renorm=True, momentum=0.8)))


@program(models.images)
def batch_norm_of_a_convolution():
    return models.image_classifier(
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
    )


@program(models.steps)
def batch_norm_with_a_mask():
    return with_sgd(models.masked_steps(layers.BatchNormalization()))


@program(models.regression)
def layer_norm():
    return with_sgd(mlp(layers.LayerNormalization()))


@program(models.regression)
def spectral_norm():
    return with_sgd(mlp(layers.SpectralNormalization(layers.Dense(8))))


@program(models.regression)
def dropout():
    return with_sgd(mlp(layers.Dropout(0.5, seed=3)))


@program(models.regression)
def dropout_without_a_seed():
    return with_sgd(mlp(layers.Dropout(0.5)))


@program(models.images)
def spatial_dropout():
    return models.image_classifier(
        layers.Conv2D(4, 3, activation="relu"),
        layers.SpatialDropout2D(0.5, seed=3),
        layers.Flatten(),
    )


@program(models.images)
def random_flip_and_brightness():
    return models.image_classifier(
        layers.RandomFlip("horizontal", seed=3),
        layers.RandomBrightness(0.2, value_range=(0, 1), seed=4),
        layers.Flatten(),
    )


class Noise(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + 0.3 * keras.random.normal(ops.shape(x), seed=self.seeds)


@program(models.regression)
def noise_of_a_users_layer():
    return with_sgd(mlp(Noise()))


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


@program(models.regression)
def moving_mean_of_a_users_layer():
    return with_sgd(mlp(MovingMean()))


@program(models.words)
def embedding():
    return models.tagger(layers.Embedding(models.WORDS, 4))


@program(models.regression)
def lora():
    return with_sgd(models.with_lora())


@program(models.regression)
def standardization_over_the_batch():
    """Compute statistics of the batch, in a layer of the user's."""
    return with_sgd(
        mlp(Lambda(lambda x: (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1)))
    )
