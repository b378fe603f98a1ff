"""Train on two devices on the digits 0 to 4, then learn 5 to 9 from thirty images.

What the first training has found out about strokes is kept: its layers are frozen, and
only a new last layer is trained. Beside it the same network learns the thirty images
from nothing, with all of its layers. The file is the same for every backend:

    KERAS_BACKEND=jax python examples/transfer_learning.py
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
EPOCHS = 6
FEW = 30
BATCH_SIZE = 64  # thirty rows are less than one
ACCURACY_WANTED = 0.75


def load():
    """Return images and labels of 0 to 4, few of 5 to 9, and the rest of those."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    labels = digits.target.astype("int32")
    first, second = labels < 5, labels >= 5
    x, y = images[second], labels[second] - 5
    return (images[first], labels[first]), (x[:FEW], y[:FEW]), (x[FEW:], y[FEW:])


def strokes():
    """Return the layers that see strokes."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.Flatten(),
        ]
    )


def with_head(body, learning_rate):
    """Return a compiled model of a body and a new last layer for five digits."""
    model = keras.Sequential([body, keras.layers.Dense(5)])
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    """Train, transfer, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    epochs = parser.parse_args().epochs

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    many, few, rest = load()

    with strategy.scope():
        body = strokes()
        model = with_head(body, 3e-3)
    print("0 to 4")
    model.fit(*many, batch_size=BATCH_SIZE, epochs=epochs, verbose=2)

    reached = {}
    with strategy.scope():
        body.trainable = False
        # Compiled after that: a model trains what is trainable when it is compiled.
        models = {
            "transferred": with_head(body, 3e-3),
            "from nothing": with_head(strokes(), 3e-3),
        }
    frozen = body.get_weights()
    for name, model in models.items():
        print(f"5 to 9, {name}")
        model.fit(
            *few,
            batch_size=BATCH_SIZE,
            epochs=5 * epochs,
            validation_data=rest,
            validation_batch_size=512,
            verbose=2,
        )
        reached[name] = model.evaluate(*rest, batch_size=512, verbose=0)[1]
    print(", ".join(f"{name} {value:.3f}" for name, value in reached.items()))
    if any(map(np.any, map(np.subtract, body.get_weights(), frozen))):
        print("FAILED: expected frozen layers to stay as they were")
        return 1
    if epochs >= EPOCHS and not reached["transferred"] >= ACCURACY_WANTED:
        print(f"FAILED: expected {ACCURACY_WANTED} or more")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
