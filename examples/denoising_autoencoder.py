"""Train an autoencoder on two devices to take the noise out of photographs.

The data are pieces of the two photographs that come with scikit-learn (Pillow reads
them). The noise is drawn in the model, by a layer: each device draws its rows of what
one device would draw. The file is the same for every backend:

    KERAS_BACKEND=tensorflow python examples/denoising_autoencoder.py
"""

import argparse
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_sample_images

import keras_strategy as ks

SEED = 7
EPOCHS = 5
SIZE = 16  # pixels of a piece's side
BATCH_SIZE = 64  # 2,050 pieces: the last batch has 2
NOISE = 0.15
# Of the error that the noise makes.
ERROR_WANTED = 0.5


def load():
    """Return pieces to train with and pieces to test with."""
    pieces = []
    for photograph in load_sample_images().images:
        high, wide = (side // SIZE for side in photograph.shape[:2])
        whole = photograph[: high * SIZE, : wide * SIZE].reshape(
            high, SIZE, wide, SIZE, 3
        )
        pieces.append(whole.swapaxes(1, 2).reshape(-1, SIZE, SIZE, 3))
    pieces = np.random.default_rng(SEED).permutation(np.concatenate(pieces))
    pieces = pieces.astype("float32") / 255
    return pieces[:-30], pieces[-30:]


def build():
    """Return a compiled model that says which noise there is, and takes it away."""
    layers = keras.layers
    clean = keras.Input((SIZE, SIZE, 3))
    noisy = layers.GaussianNoise(NOISE, seed=SEED)(clean)  # in training alone
    x = layers.Conv2D(16, 3, strides=2, padding="same", activation="gelu")(noisy)
    x = layers.Conv2D(24, 3, padding="same", activation="gelu")(x)
    x = layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="gelu")(x)
    noise = layers.Conv2D(3, 3, padding="same")(layers.Concatenate()([x, noisy]))
    model = keras.Model(clean, noisy - noise)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return model


def main():
    """Train, denoise pieces that were not trained with; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", help="a file.npz for what came out")
    options = parser.parse_args()

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    pieces, test = load()
    random = np.random.default_rng(SEED)
    noisy = test + random.normal(scale=NOISE, size=test.shape).astype("float32")

    with strategy.scope():
        model = build()
    model.fit(pieces, pieces, batch_size=BATCH_SIZE, epochs=options.epochs, verbose=2)
    denoised = model.predict(noisy, batch_size=BATCH_SIZE, verbose=0)
    if options.save:
        np.savez(options.save, noisy=noisy[:8], denoised=denoised[:8], clean=test[:8])

    before, after = (float(np.mean((x - test) ** 2)) for x in (noisy, denoised))
    print(f"mean squared error {before:.4f} with the noise, {after:.4f} without")
    if options.epochs >= EPOCHS and not after <= ERROR_WANTED * before:
        print(f"FAILED: expected {ERROR_WANTED * before:.4f} or less")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
