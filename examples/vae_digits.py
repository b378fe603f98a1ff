"""Train a variational autoencoder on two devices, and draw what it has learnt.

The encoder says for each of scikit-learn's digits where it lies on a plane, and how
sure it is; the decoder draws a digit for each point of the plane. The random numbers of
the training are one device's, split by rows. The file is the same for every backend:

    KERAS_BACKEND=torch python examples/vae_digits.py
"""

import argparse
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
EPOCHS = 20
BATCH_SIZE = 64  # 1,797 rows: the last batch has 5, which two does not divide
LOSS_WANTED = 27.0
SIDE = 12  # digits in a row of the drawing


class Sample(keras.layers.Layer):
    """Draws a point near the mean, and adds the price of knowing where."""

    def __init__(self):
        super().__init__()
        self.random = keras.random.SeedGenerator(SEED)

    def call(self, mean, log_variance):
        # One value for each row, so that its mean is the mean over the global batch.
        known = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(ops.mean(-0.5 * ops.sum(known, axis=1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.random)
        return mean + ops.exp(0.5 * log_variance) * noise


def build():
    """Return the model that is trained, compiled, and its decoder."""
    layers = keras.layers
    decoder = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(64, "gelu"),
            layers.Dense(128, "gelu"),
            layers.Dense(64, "sigmoid"),
        ]
    )
    pixels = keras.Input((64,))
    x = layers.Dense(128, "gelu")(pixels)
    x = layers.Dense(64, "gelu")(x)
    point = Sample()(layers.Dense(2)(x), layers.Dense(2)(x))
    model = keras.Model(pixels, decoder(point))

    def of_pixels(wanted, drawn):
        return ops.sum(ops.binary_crossentropy(wanted, drawn), axis=1)

    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=of_pixels)
    return model, decoder


def main():
    """Train, draw the plane, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", help="a file.npz for what came out")
    options = parser.parse_args()

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    images = (load_digits().data / 16).astype("float32")

    with strategy.scope():
        model, decoder = build()
    history = model.fit(
        images, images, batch_size=BATCH_SIZE, epochs=options.epochs, verbose=2
    )
    # Points of which as many rows lie in each part of the plane.
    steps = np.linspace(-1.6, 1.6, SIDE, dtype="float32")
    plane = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    drawn = decoder.predict(plane, verbose=0)
    if options.save:
        np.savez(options.save, plane=drawn.reshape(-1, 8, 8))

    loss = history.history["loss"][-1]
    print(f"loss {loss:.2f} of a digit, drawn {len(drawn)}")
    if options.epochs >= EPOCHS and not loss <= LOSS_WANTED:
        print(f"FAILED: expected {LOSS_WANTED} or less")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
