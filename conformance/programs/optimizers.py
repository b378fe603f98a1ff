"""Optimizers, what they do with gradients, and state that they keep."""

import keras
from keras import layers, ops, optimizers

from conformance import models
from conformance.models import compiled, mlp
from conformance.program import Data, program


@program(models.regression)
def sgd_with_momentum():
    return compiled(mlp(), optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@program(models.regression)
def adam():
    return compiled(mlp(), optimizers.Adam(0.01))


@program(models.regression)
def adafactor():
    return compiled(mlp(), optimizers.Adafactor(0.01))


@program(models.regression)
def muon():
    return compiled(mlp(), optimizers.Muon(0.01))


@program(models.regression)
def clipnorm():
    return compiled(mlp(), optimizers.SGD(0.05, clipnorm=0.2))


@program(models.regression)
def global_clipnorm():
    return compiled(mlp(), optimizers.Adam(0.01, global_clipnorm=0.2))


@program(models.regression)
def clipvalue():
    return compiled(mlp(), optimizers.SGD(0.05, clipvalue=0.1))


@program(models.regression)
def gradient_accumulation():
    return compiled(mlp(), optimizers.Adam(0.01, gradient_accumulation_steps=2))


@program(models.regression)
def moving_average_of_weights():
    return compiled(
        mlp(),
        optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    )


class NotANumberAtZero(layers.Layer):
    """Layer whose weight has a gradient of NaN for a row of zeros."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        s = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return x + 0.0 * ops.sqrt(self.scale * s)


def _with_a_row_of_zeros(rows):
    data = models.regression(rows)
    data.x[23] = 0.0
    return Data(data.x, data.y)


@program(_with_a_row_of_zeros)
def loss_scale_with_a_nan():
    """Skip the step in which one replica has a gradient of NaN."""
    scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=8.0)
    return compiled(mlp(NotANumberAtZero()), scaled)


@program(models.regression)
def learning_rate_schedule():
    schedule = optimizers.schedules.CosineDecay(0.0, 10, 0.1, warmup_target=0.1)
    return compiled(mlp(), optimizers.SGD(schedule))


class SignOfGradients(optimizers.Optimizer):
    """Optimizer of the user's that takes the sign of a gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * ops.tanh(10 * gradient))


@program(models.regression)
def users_optimizer():
    return compiled(mlp(), SignOfGradients(0.01))


@program(models.regression)
def frozen_weights():
    frozen = layers.Dense(8, trainable=False)
    return compiled(mlp(frozen), keras.optimizers.Adam(0.01))
