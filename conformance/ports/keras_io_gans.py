"""keras.io's examples of GANs, whose models have steps of their own."""

import keras
import numpy as np
from keras import ops

from conformance.compare import scope
from conformance.ports.keras_io_generative import EXAMPLES, IMAGES, NoCall
from conformance.ports.port import (
    PURE,
    compiled,
    dense,
    gradient_by,
    port,
    step_of,
    stepped,
)


class GAN(NoCall):
    names = ()
    classes = 0

    def __init__(self):
        super().__init__()
        self.discriminator = dense(4 + self.classes, 1)
        self.generator = dense(2 + self.classes, 4)
        self.seed_generator = keras.random.SeedGenerator(1337)

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

    def noise_for(self, images):
        shape = (ops.shape(images)[0], 2)
        return keras.random.normal(shape, seed=self.seed_generator)

    def train_discriminator(self, loss_of):
        weights = self.discriminator.trainable_weights
        return step_of(self.d_optimizer, weights, loss_of)

    def train_generator(self, loss_of):
        return step_of(self.g_optimizer, self.generator.trainable_weights, loss_of)

    def log(self, d_loss, g_loss):
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, real_images):
        noise = self.noise_for(real_images)
        generated_images = self.generator(noise)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        ones = ops.ones_like(noise[:, :1])
        labels = ops.concatenate([ones, ops.zeros_like(ones)], axis=0)
        # Add random noise to the labels - important trick!
        shape = ops.shape(labels)
        labels += 0.05 * keras.random.uniform(shape, seed=self.seed_generator)
        d_loss = self.train_discriminator(
            lambda: self.loss_fn(labels, self.discriminator(combined_images))
        )

        def g_loss_of():
            fake_images = self.generator(self.noise_for(real_images))
            return self.loss_fn(ops.zeros_like(ones), self.discriminator(fake_images))

        return self.log(d_loss, self.train_generator(g_loss_of))


def compile_gan(model):
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    return compiled(model, *optimizers, loss_fn)


@port(f"{EXAMPLES}/dcgan_overriding_train_step.py", not_on=PURE, sample=True)
def gan(strategy):
    return stepped(strategy, lambda: compile_gan(GAN()), IMAGES)


@port(f"{EXAMPLES}/dcgan_overriding_train_step.py", not_on=PURE)
def gan_compiled_outside_of_the_scope(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = GAN()
    return stepped(None, lambda: compile_gan(model), IMAGES)


class ConditionalGAN(GAN):
    """GAN whose two networks receive the class of an image."""

    classes = 3

    def generated(self, images, one_hot_labels):
        latent = ops.concatenate([self.noise_for(images), one_hot_labels], axis=1)
        return ops.concatenate([self.generator(latent), one_hot_labels], -1)

    def train_step(self, data):
        real_images, one_hot_labels = data
        fake_images = self.generated(real_images, one_hot_labels)
        real_images = ops.concatenate([real_images, one_hot_labels], -1)
        combined_images = ops.concatenate([fake_images, real_images], axis=0)
        ones = ops.ones_like(one_hot_labels[:, :1])
        labels = ops.concatenate([ones, ops.zeros_like(ones)], axis=0)
        d_loss = self.train_discriminator(
            lambda: self.loss_fn(labels, self.discriminator(combined_images))
        )

        def g_loss_of():
            both = self.generated(real_images, one_hot_labels)
            return self.loss_fn(ops.zeros_like(ones), self.discriminator(both))

        return self.log(d_loss, self.train_generator(g_loss_of))


@port(f"{EXAMPLES}/conditional_gan.py", not_on=PURE)
def conditional_gan(strategy):
    one_hot = keras.utils.to_categorical(np.arange(17) % 3, 3)
    return stepped(strategy, lambda: compile_gan(ConditionalGAN()), IMAGES, one_hot)


class WGAN(GAN):
    """A gradient penalty, and several critic steps."""

    def train_step(self, real_images):
        rows = ops.shape(real_images)[0]

        def d_loss_of():
            fake_images = self.generator(self.noise_for(real_images))
            alpha = keras.random.uniform((rows, 1), seed=self.seed_generator)
            interpolated = real_images + alpha * (fake_images - real_images)
            gradients = gradient_by(self.discriminator, interpolated)
            norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)
            penalty = ops.mean(ops.square(norm - 1.0))
            fake = ops.mean(self.discriminator(fake_images))
            return fake - ops.mean(self.discriminator(real_images)) + 10.0 * penalty

        def g_loss_of():
            fake_images = self.generator(self.noise_for(real_images))
            return -ops.mean(self.discriminator(fake_images))

        for _ in range(2):
            d_loss = self.train_discriminator(d_loss_of)
        return {"d_loss": d_loss, "g_loss": self.train_generator(g_loss_of)}


@port(f"{EXAMPLES}/wgan_gp.py", not_on=PURE, sample=True)
def wgan_gp(strategy):
    return stepped(strategy, lambda: compile_gan(WGAN()), IMAGES)
