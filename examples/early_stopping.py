"""Stop a training in the middle, start it again, and end as if nothing had happened.

A program that may be killed backs up, and is started again with the same arguments.
Here a callback plays the one that kills. `EarlyStopping` goes on counting where it was,
and the weights at the end are those of a training that nobody has stopped. The file is
the same for every backend:

    KERAS_BACKEND=tensorflow python examples/early_stopping.py
"""

import os
import sys
import tempfile

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
MOST_EPOCHS = 40
BATCH_SIZE = 32  # 500 rows: the last batch has 20


class Killed(Exception):
    """The machine is taken away."""


class Killer(keras.callbacks.Callback):
    """Ends the program in the middle of its sixth epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (5, 8):
            raise Killed


def train(strategy, data, backup=None, killer=()):
    """Build and train as a program does that is started; return model and losses."""
    x_train, x_test, y_train, y_test = data
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, "gelu"),
                layers.Dropout(0.3),
                layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    callbacks = [keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)]
    if backup:
        callbacks.append(ks.callbacks.BackupAndRestore(backup, save_freq=4))
    history = model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=MOST_EPOCHS,
        validation_data=(x_test, y_test),
        validation_batch_size=512,
        callbacks=[*callbacks, *killer],
        verbose=2,
    )
    return model.get_weights(), history


def main():
    """Train with and without the interruption; return the exit status."""
    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target.astype("int32")
    data = train_test_split(images, labels, train_size=500, random_state=SEED)

    print("not interrupted")
    expected, history = train(strategy, data)
    with tempfile.TemporaryDirectory() as folder:
        print("interrupted")
        try:
            train(strategy, data, folder, [Killer()])
        except Killed:
            print("killed in epoch 6, after 9 batches; started again")
        weights, resumed = train(strategy, data, folder)

    difference = max(
        float(np.max(np.abs(got - want)))
        for got, want in zip(weights, expected, strict=True)
    )
    last, again = history.epoch[-1], resumed.epoch[-1]
    print(f"stopped after epoch {last + 1}, and {again + 1} with the interruption")
    print(f"largest weight difference {difference:.1e}")
    if last != again or difference != 0:
        print("FAILED: expected the same epoch, and no difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
