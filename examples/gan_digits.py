"""Train a generator and a discriminator on two devices, in alternating steps.

The generator learns to make images like scikit-learn's digits, the discriminator to
recognize real ones. Each has its optimizer and its step. The program is the same for
every backend:

    KERAS_BACKEND=torch python examples/gan_digits.py
"""

# %% [markdown]
# ## Set up
#
# Select the backend before Keras is imported. `NPROC` is the size of XLA's thread pool
# for CPU devices. On few cores it would be too small for two devices that wait for each
# other.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # or "jax", or "tensorflow"
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
EPOCHS = 10
GLOBAL_BATCH = 64
NOISE = 16

ks.config.set_logical_devices("cpu", 2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
keras.utils.set_random_seed(SEED)

# %% [markdown]
# ## The data
#
# Each batch has images, and noise for as many generated images. The noise is a part of
# the batch, so that it does not depend on the number of devices. The last of the 1,797
# rows make a batch of 5, which two devices do not divide.

# %%
random = np.random.default_rng(SEED)
images = (load_digits().data / 16).astype("float32")


def epoch_of_batches():
    """Yield the batches of an epoch."""
    order = random.permutation(len(images))
    for begin in range(0, len(order), GLOBAL_BATCH):
        rows = order[begin : begin + GLOBAL_BATCH]
        noise = random.normal(size=(len(rows), NOISE)).astype("float32")
        yield images[rows], noise


# %% [markdown]
# ## Two models, two optimizers
#
# Create everything that has variables in the scope.

# %%
with strategy.scope():
    layers = keras.layers
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(128, "relu"),
            layers.Dense(64, "sigmoid"),
        ]
    )
    discriminator = keras.Sequential(
        [keras.Input((64,)), layers.Dense(128, "gelu"), layers.Dense(1)]
    )
    generators_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    discriminators_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)

# %% [markdown]
# ## The loss
#
# `compute_average_loss` divides by the rows of the global batch. The losses of the
# devices add up to the loss of one device.

# %%
per_row = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def loss_of(logits, is_real):
    """Return the loss of a discriminator that should find real images, or made ones."""
    wanted = keras.ops.full_like(logits, float(is_real))
    return ks.compute_average_loss(per_row(wanted, logits))


# %% [markdown]
# ## The discriminator's step
#
# It learns from real images and as many generated ones.


# %%
def discriminator_step(real, noise):
    """Update the discriminator, and return this device's part of its loss."""
    made = generator(noise, training=False)

    def loss():
        of_real = loss_of(discriminator(real, training=True), True)
        return of_real + loss_of(discriminator(made, training=True), False)

    variables = discriminator.trainable_variables
    value, gradients = ks.value_and_grad(loss, variables)()
    discriminators_optimizer.apply(gradients, variables)
    return value


# %% [markdown]
# ## The generator's step
#
# It learns to make images that the discriminator takes for real ones.


# %%
def generator_step(real, noise):
    """Update the generator, and return this device's part of its loss."""

    def loss():
        return loss_of(discriminator(generator(noise, training=True)), True)

    variables = generator.trainable_variables
    value, gradients = ks.value_and_grad(loss, variables)()
    generators_optimizer.apply(gradients, variables)
    return value


# %% [markdown]
# ## How far generated images are from real ones
#
# The distance compares the means of the pixels.

# %%
some_noise = random.normal(size=(512, NOISE)).astype("float32")


def distance():
    """Return the mean difference between generated and real images, by pixels."""
    made = generator.predict(some_noise, verbose=0)
    return float(np.abs(made.mean(axis=0) - images.mean(axis=0)).mean())


first = distance()
print(f"before training: distance {first:.4f}")

# %% [markdown]
# ## The loop

# %%
for epoch in range(EPOCHS):
    sums, steps = np.zeros(2), 0
    for batch in strategy.experimental_distribute_dataset(epoch_of_batches()):
        losses = (
            strategy.run(discriminator_step, args=batch),
            strategy.run(generator_step, args=batch),
        )
        sums += [float(strategy.reduce("SUM", loss)) for loss in losses]
        steps += 1
    print(
        f"epoch {epoch + 1}: discriminator {sums[0] / steps:.4f}, "
        f"generator {sums[1] / steps:.4f}, distance {distance():.4f}"
    )

# %% [markdown]
# ## The result
#
# Ten short epochs only teach the generator where the ink is.

# %%
reached = distance() / first
print(f"the distance of the pixels' means fell to {reached:.2f} of the first")
assert reached <= 0.5

# %% [markdown]
# Above are generated images, below real ones.

# %%
made = generator.predict(some_noise[:12], verbose=0).reshape(-1, 8, 8)
real = images[:12].reshape(-1, 8, 8)
rows = [np.concatenate(digits, axis=1) for digits in (made, real)]
picture = np.kron(np.concatenate(rows), np.ones((6, 6)))
keras.utils.array_to_img(picture[..., np.newaxis])
