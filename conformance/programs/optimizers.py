"""Optimizers, what they do with gradients, and state that they keep."""

import keras
from keras import layers, ops, optimizers

from conformance import models
from conformance.models import mlp, with_sgd
from conformance.program import program


@program(models.regression)
def sgd_with_momentum():
    return with_sgd(mlp(), optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@program(models.regression)
def adam():
    return with_sgd(mlp(), optimizers.Adam(0.01))


@program(models.regression)
def adafactor():
    return with_sgd(mlp(), optimizers.Adafactor(0.01))


@program(models.regression)
def muon():
    return with_sgd(mlp(), optimizers.Muon(0.01))


@program(models.regression)
def clipnorm():
    return with_sgd(mlp(), optimizers.SGD(0.05, clipnorm=0.2))


@program(models.regression)
def global_clipnorm():
    return with_sgd(mlp(), optimizers.Adam(0.01, global_clipnorm=0.2))


@program(models.regression)
def clipvalue():
    return with_sgd(mlp(), optimizers.SGD(0.05, clipvalue=0.1))


@program(models.regression)
def gradient_accumulation():
    return with_sgd(mlp(), optimizers.Adam(0.01, gradient_accumulation_steps=2))


@program(models.regression)
def moving_average_of_weights():
    return with_sgd(
        mlp(),
        optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    )


@program(lambda rows: models.with_a_row_of_zeros(rows, 23))
def loss_scale_with_a_nan():
    """Skip the step in which one replica has a gradient of NaN."""
    scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=8.0)
    return with_sgd(mlp(models.NotANumberAtZero()), scaled)


@program(models.regression)
def learning_rate_schedule():
    schedule = optimizers.schedules.CosineDecay(0.0, 10, 0.1, warmup_target=0.1)
    return with_sgd(mlp(), optimizers.SGD(schedule))


class SignOfGradients(optimizers.Optimizer):
    """Optimizer of the user's that takes the sign of a gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * ops.tanh(10 * gradient))


@program(models.regression)
def users_optimizer():
    return with_sgd(mlp(), SignOfGradients(0.01))


@program(models.regression)
def frozen_weights():
    frozen = layers.Dense(8, trainable=False)
    return with_sgd(mlp(frozen), keras.optimizers.Adam(0.01))
