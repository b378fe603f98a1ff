"""The tutorial "Distributed training with Keras" of tf.distribute, ported.

Its steps are the same: a strategy, a model in its scope, callbacks that save and lower
the learning rate, and the saved model loaded with a strategy and without. What changed
is marked with "was". The file is the same for every backend:

    KERAS_BACKEND=torch python examples/tf_distribute_port.py
"""

import argparse
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

ACCURACY_WANTED = 0.9


def decay(epoch):
    """Return the learning rate of an epoch."""
    return 1e-2 if epoch < 3 else 1e-3 if epoch < 7 else 1e-4


def main():
    """Train, save, load, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    keras.utils.set_random_seed(7)

    # Was: tf.config.set_logical_device_configuration(...)
    ks.config.set_logical_devices("cpu", 2)
    # Was: tf.distribute.MirroredStrategy()
    strategy = ks.MirroredStrategy()
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")

    # Was: tfds.load("mnist"), and a tf.data.Dataset of it, which may stay.
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target.astype("int32"), test_size=0.2, random_state=7
    )
    batch_size = 32 * strategy.num_replicas_in_sync

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(),
            metrics=["accuracy"],
        )

    with tempfile.TemporaryDirectory() as folder:
        model.fit(
            x_train,
            y_train,
            batch_size=batch_size,
            epochs=epochs,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    os.path.join(folder, "{epoch}.weights.h5"), save_weights_only=True
                ),
                keras.callbacks.LearningRateScheduler(decay),
            ],
            verbose=2,
        )
        # Was: tf.train.latest_checkpoint(folder)
        model.load_weights(os.path.join(folder, f"{epochs}.weights.h5"))
        path = os.path.join(folder, "model.keras")
        model.save(path)

        alone = keras.models.load_model(path)
        with strategy.scope():
            replicated = keras.models.load_model(path)

    accuracies = [
        loaded.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)[1]
        for loaded in (model, alone, replicated)
    ]
    print("accuracy {:.4f}; loaded {:.4f}, in scope {:.4f}".format(*accuracies))
    if np.ptp(accuracies) > 1e-5 or min(accuracies) <= ACCURACY_WANTED:
        print(f"FAILED: expected the same of all, and over {ACCURACY_WANTED}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
