"""Train on several workers, each of which reads its own rows alone.

The data are rows in a file, read one by one, as of a data set that is too large to be
held. Every worker runs this file:

    keras-strategy run --workers 2 examples/own_rows.py

Each says how many rows it has read. Without a launcher it trains alone.
"""

import argparse
import os
import sys
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
BATCH_SIZE = 64  # 1,797 rows: the last batch has 5, which two does not divide
LOSS_WANTED = 0.5


class Rows:
    """The rows of a file of NumPy's, and how many were read."""

    def __init__(self, path, labels):
        self.images = np.load(path, mmap_mode="r")
        self.labels = labels
        self.read = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        self.read += 1
        return np.array(self.images[row]), self.labels[row]


def main():
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    # Before anything else that uses devices.
    strategy = ks.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, "gelu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(5e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "images.npy")
        np.save(path, (digits.data / 16).astype("float32"))
        rows = Rows(path, digits.target.astype("int32"))
        batches = ks.IndexedDataset(rows, BATCH_SIZE, shuffle=True, seed=SEED)
        history = model.fit(batches, epochs=epochs, verbose=2)

    worker = strategy.extended.local_replicas.start
    loss = history.history["loss"][-1]
    print(
        f"{keras.backend.backend()}, worker {worker} of {replicas}: "
        f"read {rows.read} of {epochs * len(rows)} rows, loss {loss:.4f}"
    )
    # The first row tells what a row is, each worker reads some for a comparison, and on
    # TensorFlow Keras looks at two whole batches before it trains.
    if not rows.read <= epochs * len(rows) / replicas + 3 * BATCH_SIZE:
        print("FAILED: expected its own rows alone")
        return 1
    if not loss <= LOSS_WANTED:
        print(f"FAILED: expected a loss of {LOSS_WANTED} or less")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
