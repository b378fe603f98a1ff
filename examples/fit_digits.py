"""Train a small CNN on two devices, then on one, and compare the weights.

The data are scikit-learn's digits: 1,797 images of 8x8 pixels, shipped with it. The
file is the same for every backend:

    KERAS_BACKEND=torch python examples/fit_digits.py
"""

import contextlib
import os
import sys
import time

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 15
BATCH_SIZE = 64  # 1,437 rows: the last batch has 29, which two does not divide
LEARNING_RATE = 6e-3
ACCURACY_WANTED = 0.97
# A gradient added up in two parts rounds differently from one added up at once, and
# every step carries the rounding on. Rounding stays far below this; a wrong gradient
# does not.
DIFFERENCE_ALLOWED = 1e-4


def load():
    """Return training images and labels, test images and labels."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    labels = digits.target.astype("int32")
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    return x_train, y_train, x_test, y_test


def build(rows):
    """Return a compiled CNN, its learning rate falling to 0 over EPOCHS epochs.

    The network is smooth on purpose. At the kinks of ReLU and of max-pooling a rounding
    error can turn a whole gradient on or off, and two trainings that differ by 1e-7 at
    first may end 1e-2 apart, on one device as well.
    """
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dense(32, activation="gelu"),
            layers.Dense(10),
        ]
    )
    steps = EPOCHS * -(-rows // BATCH_SIZE)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(scope, data):
    """Build and train in scope, from the same seed each time."""
    x_train, y_train, x_test, y_test = data
    # The seed fixes the initial weights and the order of the rows.
    keras.utils.set_random_seed(SEED)
    with scope:
        model = build(len(x_train))
    start = time.perf_counter()
    model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS)
    seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)
    print(f"test accuracy {accuracy:.4f}, trained in {seconds:.1f} s")
    return model.get_weights(), accuracy


def main():
    """Train twice; return the exit status."""
    ks.config.set_logical_devices("cpu", 2)
    data = load()

    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"\n{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    weights, accuracy = train(strategy.scope(), data)

    print(f"\n{keras.backend.backend()} on one device")
    expected, _ = train(contextlib.nullcontext(), data)

    difference = max(
        float(np.max(np.abs(got - want)))
        for got, want in zip(weights, expected, strict=True)
    )
    print(f"\nlargest weight difference {difference:.1e}")

    status = 0
    if accuracy <= ACCURACY_WANTED:
        print(f"FAILED: expected a test accuracy over {ACCURACY_WANTED}")
        status = 1
    if not difference <= DIFFERENCE_ALLOWED:  # NaN fails too
        print(f"FAILED: expected a difference of at most {DIFFERENCE_ALLOWED}")
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
