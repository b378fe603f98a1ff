"""Train a large network on two devices, then a small one to say what it says.

The small one, of two layers, learns from a hundred labels; distilled, from what the
large one says of all digits. The file is the same for every backend:

    KERAS_BACKEND=torch python examples/distillation.py
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
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 10
BATCH_SIZE = 64  # 1,437 rows: the last batch has 29, which two does not divide
LABELLED = 100
TEMPERATURE = 3.0


def load():
    """Return training and test images, training and test labels."""
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    return train_test_split(
        images, digits.target.astype("int32"), test_size=0.2, random_state=SEED
    )


def network(*widths):
    """Return a network that gives a logit for each digit."""
    hidden = [keras.layers.Dense(width, "gelu") for width in widths]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def compiled(model):
    """Return a model that is ready for fit."""
    model.compile(
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Distilled(keras.Model):
    """A small network and the large one that it learns from."""

    def __init__(self, small, large):
        super().__init__()
        self.small, self.large = small, large

    def call(self, x, training=None):
        return self.small(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        said = ops.softmax(self.large(x, training=False) / TEMPERATURE)
        per_row = keras.losses.categorical_crossentropy(
            said, y_pred / TEMPERATURE, from_logits=True
        )
        return ops.mean(per_row) * TEMPERATURE**2


def main():
    """Train three networks, compare them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    epochs = parser.parse_args().epochs

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    x_train, x_test, y_train, y_test = load()

    reached = {}

    def train(name, model, rows, epochs):
        print(name)
        model.fit(
            x_train[:rows],
            y_train[:rows],
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=2,
        )
        logits = model.predict(x_test, batch_size=512, verbose=0)
        reached[name] = float(np.mean(np.argmax(logits, axis=1) == y_test))

    with strategy.scope():
        large, alone = compiled(network(128, 128)), compiled(network(16))
    train("large", large, len(x_train), epochs)
    train("small alone", alone, LABELLED, 4 * epochs)
    large.trainable = False
    with strategy.scope():
        distilled = compiled(Distilled(network(16), large))
    train("small distilled", distilled, len(x_train), 2 * epochs)
    print(", ".join(f"{name} {value:.3f}" for name, value in reached.items()))
    if epochs >= EPOCHS and not reached["small distilled"] > reached["small alone"]:
        print("FAILED: expected more from the large network's word")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
