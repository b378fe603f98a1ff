"""Train a small network on several workers, and compare with one device.

Every worker runs this file. On one machine:

    keras-strategy run --workers 2 examples/multi_worker.py

Without a launcher it trains alone, on one device. Where several workers train, the
chief trains once more on its own and prints the largest difference of the weights.
"""

import argparse
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
BATCH_SIZE = 64  # 1,437 rows: the last batch has 29, which two does not divide
DIFFERENCE_ALLOWED = 1e-4


def load():
    """Return training images and labels, test images and labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int32")
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    return x_train, y_train, x_test, y_test


def build():
    """Return a compiled network."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(model, data, epochs, callbacks=()):
    """Train a model and return its weights and test accuracy."""
    x_train, y_train, x_test, y_test = data
    # The seed fixes the order of the rows.
    keras.utils.set_random_seed(SEED)
    model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=2,
    )
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)
    return model.get_weights(), accuracy


def main(arguments):
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backup", help="a folder to resume from after a failure")
    options = parser.parse_args(arguments)

    # Before anything else that uses devices.
    strategy = ks.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    data = load()

    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = build()
    callbacks = []
    if options.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(options.backup))
    weights, accuracy = train(model, data, options.epochs, callbacks)

    if not strategy.is_chief:
        return 0  # the rest is the chief's
    print(f"{keras.backend.backend()} on {replicas} replicas: accuracy {accuracy:.4f}")
    if replicas == 1:
        return 0
    keras.utils.set_random_seed(SEED)
    expected, _ = train(build(), data, options.epochs)
    difference = max(
        float(np.max(np.abs(got - want)))
        for got, want in zip(weights, expected, strict=True)
    )
    print(f"largest weight difference to one device {difference:.1e}")
    if not difference <= DIFFERENCE_ALLOWED:  # NaN fails too
        print(f"FAILED: expected a difference of at most {DIFFERENCE_ALLOWED}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
