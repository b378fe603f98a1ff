"""Models with steps of their own, after keras.io's examples of generative learning.

What they draw at random comes with the data here, so that all replicas' rows get what
one device's do.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.testing.equality.compare import largest, scope

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="a step of one's own is a pure function there"
)
RNG = np.random.RandomState(0)
# By batches of 8 the last one has a row for the first replica alone.
IMAGES = RNG.rand(17, 4).astype("float32")
NOISE = RNG.randn(17, 2).astype("float32")


def dense(units, outputs):
    return keras.Sequential(
        [keras.Input((units,)), layers.Dense(8, "tanh"), layers.Dense(outputs)]
    )


def step_of(optimizer, model, loss_of):
    """What `tape.gradient` and `apply_gradients` do in the examples."""
    variables = model.trainable_weights
    loss, gradients = ks.value_and_grad(loss_of, variables)()
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


class NoCall(keras.Model):
    """On torch, Keras takes no model for built that it cannot call."""

    def __init__(self):
        super().__init__()
        self.built = BACKEND == "torch"


class GAN(NoCall):
    """After keras.io's dcgan_overriding_train_step: there is no `call`."""

    def __init__(self):
        super().__init__()
        self.discriminator = dense(4, 1)
        self.generator = dense(2, 4)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real_images, noise = data
        generated_images = self.generator(noise)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        ones = ops.ones_like(noise[:, :1])
        labels = ops.concatenate([ones, ops.zeros_like(ones)], axis=0)
        d_loss = step_of(
            self.d_optimizer,
            self.discriminator,
            lambda: self.loss_fn(labels, self.discriminator(combined_images)),
        )
        g_loss = step_of(
            self.g_optimizer,
            self.generator,
            lambda: self.loss_fn(
                ops.zeros_like(ones), self.discriminator(self.generator(noise))
            ),
        )
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


class VAE(NoCall):
    """After keras.io's vae: logs under names that no metric has."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(4, 4)
        self.decoder = dense(2, 4)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(
            name="reconstruction_loss"
        )
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        images, epsilon = data

        def losses():
            encoded = self.encoder(images)
            z_mean, z_log_var = encoded[:, :2], encoded[:, 2:]
            reconstruction = ops.sigmoid(
                self.decoder(z_mean + ops.exp(0.5 * z_log_var) * epsilon)
            )
            reconstruction_loss = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(images, reconstruction))
                / ops.cast(ops.shape(images)[0], "float32")
            )
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            return reconstruction_loss + kl_loss, (reconstruction_loss, kl_loss)

        (total_loss, (reconstruction_loss, kl_loss)), gradients = ks.value_and_grad(
            losses, self.trainable_weights, has_aux=True
        )()
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def gradient_by(x, fn):
    """The gradient of a sum of outputs by inputs, to be differentiated again."""
    if BACKEND == "torch":
        import torch

        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return gradient
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = fn(x)
    return tape.gradient(outputs, x)


class WGAN(GAN):
    """After keras.io's wgan_gp: a gradient penalty, and several critic steps."""

    def train_step(self, data):
        real_images, noise = data

        def d_loss_of():
            fake_images = self.generator(noise)
            interpolated = real_images + 0.3 * (fake_images - real_images)
            gradients = gradient_by(interpolated, self.discriminator)
            norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)
            penalty = ops.mean(ops.square(norm - 1.0))
            fake = ops.mean(self.discriminator(fake_images))
            return fake - ops.mean(self.discriminator(real_images)) + 10.0 * penalty

        for _ in range(2):
            d_loss = step_of(self.d_optimizer, self.discriminator, d_loss_of)
        g_loss = step_of(
            self.g_optimizer,
            self.generator,
            lambda: -ops.mean(self.discriminator(self.generator(noise))),
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def compile_gan(model):
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.Adam(0.02),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )


def compile_vae(model):
    model.compile(keras.optimizers.Adam(0.01))


def trained(strategy, make, compile, inside):
    """Weights and logs of a model that is compiled in the scope or outside of it."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = make()
        if inside:
            compile(model)
    if not inside:
        compile(model)
    history = model.fit(IMAGES, NOISE, batch_size=8, epochs=2, verbose=0).history
    return [*model.get_weights(), *history.values()]


@pytest.mark.parametrize(
    ("make", "compile", "inside"),
    [
        (GAN, compile_gan, True),
        (GAN, compile_gan, False),
        (WGAN, compile_gan, True),
        (VAE, compile_vae, True),
    ],
    ids=["GAN", "GAN, compiled outside", "WGAN", "VAE"],
)
def test_generative_models(make, compile, inside, two):
    one = trained(None, make, compile, inside)
    assert largest(one, trained(two, make, compile, inside)) < 1e-5
