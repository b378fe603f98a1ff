"""Optimizers, what they do with gradients, and state that they keep."""

from keras import layers, ops, optimizers

from conformance import models
from conformance.models import mlp, regressor, with_sgd
from conformance.program import program, programs

SGD, Adam = optimizers.SGD, optimizers.Adam


class SignOfGradients(optimizers.Optimizer):
    """Optimizer of the user's that takes the sign of a gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * ops.tanh(10 * gradient))


def _scheduled():
    return SGD(optimizers.schedules.CosineDecay(0.0, 10, 0.1, warmup_target=0.1))


def _averaging():
    return SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)


def _trained_by(make):
    """Return a function that builds an MLP with an optimizer."""
    return lambda: regressor(optimizer=make())


programs(
    models.regression,
    sgd_with_momentum=_trained_by(lambda: SGD(0.05, momentum=0.9, nesterov=True)),
    adam=_trained_by(lambda: Adam(0.01)),
    adafactor=_trained_by(lambda: optimizers.Adafactor(0.01)),
    muon=_trained_by(lambda: optimizers.Muon(0.01)),
    clipnorm=_trained_by(lambda: SGD(0.05, clipnorm=0.2)),
    global_clipnorm=_trained_by(lambda: Adam(0.01, global_clipnorm=0.2)),
    clipvalue=_trained_by(lambda: SGD(0.05, clipvalue=0.1)),
    gradient_accumulation=_trained_by(
        lambda: Adam(0.01, gradient_accumulation_steps=2)
    ),
    moving_average_of_weights=_trained_by(_averaging),
    learning_rate_schedule=_trained_by(_scheduled),
    users_optimizer=_trained_by(lambda: SignOfGradients(0.01)),
    frozen_weights=lambda: regressor(
        layers.Dense(8, trainable=False), optimizer=Adam(0.01)
    ),
)


@program(lambda rows: models.with_a_row_of_zeros(rows, 23))
def loss_scale_with_a_nan():
    """Skip the step in which one replica has a gradient of NaN."""
    scaled = optimizers.LossScaleOptimizer(Adam(0.01), initial_scale=8.0)
    return with_sgd(mlp(models.NotANumberAtZero()), scaled)
