"""Training steps of the user's."""

import keras
from keras import layers, ops

from conformance import models
from conformance.models import with_sgd
from conformance.program import program
from conformance.step_model import StepModel, gradients_of


def _functional(cls, outputs=1, **compile):
    """Return a compiled functional model of a class."""
    inputs = keras.Input((models.FEATURES,))
    hidden = layers.Dense(8, "tanh")(inputs)
    return with_sgd(cls(inputs, layers.Dense(outputs)(hidden)), **compile)


@program(models.regression)
def custom_train_step():
    return _functional(StepModel, metrics=["mae"])


@program(models.weighted_regression)
def custom_train_step_with_sample_weight():
    return _functional(StepModel, weighted_metrics=["mae"])


class OwnLoss(StepModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]


class OwnMean(OwnLoss):
    def loss_of(self, forward, x, y, sample_weight):
        y_pred = forward(x, training=True)
        return ops.mean(ops.square(y - y_pred)), y_pred


@program(models.regression)
def own_loss_and_metrics():
    return _functional(OwnMean, loss=None)


class OwnSum(OwnLoss):
    def loss_of(self, forward, x, y, sample_weight):
        y_pred = forward(x, training=True)
        return 0.05 * ops.sum(ops.square(y - y_pred)), y_pred


@program(models.regression)
def loss_that_sums_in_the_step():
    return _functional(OwnSum, loss=None)


class Contrastive(OwnLoss):
    """Take the other rows of the batch for negatives."""

    def loss_of(self, forward, x, y, sample_weight):
        anchors = models.normalized(forward(x, training=True))
        positives = models.normalized(forward(ops.flip(x, axis=1), training=True))
        logits = ops.matmul(anchors, ops.transpose(positives)) / 0.5
        labels = ops.arange(ops.shape(logits)[0])
        loss = keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        return ops.mean(loss), anchors


@program(models.regression)
def contrastive_step():
    return _functional(Contrastive, outputs=3, loss=None)


class Clipped(StepModel):
    def change_gradients(self, gradients):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        return [g * ops.minimum(1.0, 0.2 / norm) for g in gradients]


@program(models.regression)
def gradients_clipped_in_the_step():
    return _functional(Clipped)


class Target(StepModel):
    """Follow the kernel with a moving average, and predict what it predicts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        kernel = self.trainable_variables[0]
        self.target = self.add_weight(
            shape=kernel.shape, initializer="ones", trainable=False
        )

    def loss_of(self, forward, x, y, sample_weight):
        loss, y_pred = super().loss_of(forward, x, y, sample_weight)
        teacher = ops.stop_gradient(ops.mean(ops.matmul(x, self.target), -1))
        apart = ops.reshape(y_pred, (-1,)) - teacher
        return loss + 0.1 * ops.mean(ops.square(apart)), y_pred

    def after_update(self):
        self.target.assign(0.9 * self.target + 0.1 * self.trainable_variables[0])


@program(models.regression)
def moving_average_teacher():
    return _functional(Target)


class GAN(keras.Model):
    """Networks that train against each other, as in keras.io's examples."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(4)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.criterion = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def call(self, x, training=None):
        return self.discriminator(x, training=training)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        d_optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)

    def train_step(self, data):
        noise, real, _ = keras.utils.unpack_x_y_sample_weight(data)
        fake = ops.stop_gradient(self.generator(noise))
        rows = ops.concatenate([fake, real], axis=0)
        ones = ops.ones_like(noise[:, :1])
        labels = ops.concatenate([ones, ops.zeros_like(ones)], axis=0)
        d_loss = self._update(
            self.d_optimizer,
            self.discriminator,
            lambda: self.criterion(labels, self.discriminator(rows)),
        )
        g_loss = self._update(
            self.g_optimizer,
            self.generator,
            lambda: self.criterion(
                ops.zeros_like(ones), self.discriminator(self.generator(noise))
            ),
        )
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def _update(self, optimizer, network, loss_of):
        variables = network.trainable_weights
        loss, _, gradients = gradients_of(self, lambda: (loss_of(), None), variables)
        optimizer.apply(gradients, variables)
        return loss


def _noise_and_rows(rows):
    x, _ = models.regression(rows)
    return x[:, 2:], x


@program(
    _noise_and_rows,
    needs_fit="its step has two networks and two optimizers",
    not_on={"jax": "Keras's step is a pure function there"},
)
def generative_adversarial_network():
    model = GAN()
    model.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.1))
    return model
