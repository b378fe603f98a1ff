"""Train a generator and a discriminator on two devices: two models, alternating steps.

The generator learns to make images like scikit-learn's digits, the discriminator to
tell them from real ones. Each has an optimizer and a step of its own. The file is the
same for every backend:

    KERAS_BACKEND=torch python examples/gan_digits.py
"""

import argparse
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
GLOBAL_BATCH = 64  # 1,797 rows: the last batch has 5, which two does not divide
NOISE = 16
# How far the pixels' means of generated images may be from those of real ones, of the
# distance before training.
DISTANCE_WANTED = 0.5


def batches(images, random):
    """Return a function that gives an epoch's batches of images and noise.

    The noise comes with the batch, so that its rows do not depend on the replicas.
    """

    def epoch():
        order = random.permutation(len(images))
        for begin in range(0, len(order), GLOBAL_BATCH):
            rows = order[begin : begin + GLOBAL_BATCH]
            noise = random.normal(size=(len(rows), NOISE)).astype("float32")
            yield images[rows], noise

    return epoch


def main():
    """Train, compare generated images with real ones, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save", help="a file.npz for what came out")
    options = parser.parse_args()

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    random = np.random.default_rng(SEED)
    images = (load_digits().data / 16).astype("float32")
    epoch_of_batches = batches(images, random)
    some_noise = random.normal(size=(512, NOISE)).astype("float32")

    # What has variables is made in the scope.
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

    per_row = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def said(is_real, logits):
        wanted = keras.ops.full_like(logits, float(is_real))
        return ks.compute_average_loss(per_row(wanted, logits))

    def discriminator_step(real, noise):
        made = generator(noise, training=False)

        def loss():
            right = said(True, discriminator(real, training=True))
            return right + said(False, discriminator(made, training=True))

        variables = discriminator.trainable_variables
        value, gradients = ks.value_and_grad(loss, variables)()
        discriminators_optimizer.apply(gradients, variables)
        return value

    def generator_step(real, noise):
        def loss():
            return said(True, discriminator(generator(noise, training=True)))

        variables = generator.trainable_variables
        value, gradients = ks.value_and_grad(loss, variables)()
        generators_optimizer.apply(gradients, variables)
        return value

    def distance():
        made = generator.predict(some_noise, verbose=0)
        return float(np.abs(made.mean(axis=0) - images.mean(axis=0)).mean())

    first = distance()
    for epoch in range(options.epochs):
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

    if options.save:
        made = generator.predict(some_noise[:24], verbose=0).reshape(-1, 8, 8)
        np.savez(options.save, made=made, real=images[:24].reshape(-1, 8, 8))
    reached = distance() / first
    print(f"the distance of the pixels' means fell to {reached:.2f} of the first")
    if not reached <= DISTANCE_WANTED:
        print(f"FAILED: expected {DISTANCE_WANTED} or less")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
