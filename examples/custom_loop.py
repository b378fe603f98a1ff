"""Train a small CNN on two devices with a loop of one's own.

It is the tutorial "Custom training with tf.distribute.Strategy" for every backend, on
scikit-learn's digits:

    KERAS_BACKEND=jax python examples/custom_loop.py
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

SEED = 7
GLOBAL_BATCH = 64  # 1,437 rows: the last batch has 29, which two does not divide
ACCURACY_WANTED = 0.9


class Batches(keras.utils.PyDataset):
    """Global batches of images and labels, in a new order for every epoch."""

    def __init__(self, images, labels, shuffle):
        super().__init__()
        self.images, self.labels = images, labels
        self.order = np.arange(len(images))
        self.random = np.random.RandomState(SEED) if shuffle else None

    def __len__(self):
        return -(-len(self.order) // GLOBAL_BATCH)

    def on_epoch_begin(self):
        if self.random is not None:
            self.random.shuffle(self.order)

    def __getitem__(self, index):
        rows = self.order[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
        return self.images[rows], self.labels[rows]


def load():
    """Return training and test images, training and test labels."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("float32")
    labels = digits.target.astype("int32")
    return train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )


def main():
    """Train, test after every epoch, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="a file for the best weights")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    checkpoint = options.checkpoint or os.path.join(folder.name, "best.weights.h5")

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)

    x_train, x_test, y_train, y_test = load()
    train_batches = strategy.experimental_distribute_dataset(
        Batches(x_train, y_train, shuffle=True)
    )
    test_batches = strategy.experimental_distribute_dataset(
        Batches(x_test, y_test, shuffle=False)
    )

    # What has variables is made in the scope.
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        train_accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()

    per_row = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def train_step(images, labels):
        def loss_of_batch():
            logits = model(images, training=True)
            losses = per_row(labels, logits)
            # Divided by the rows of the global batch, so that the replicas' gradients
            # add up to one device's.
            return ks.compute_average_loss(losses), logits

        variables = model.trainable_variables
        (loss, logits), gradients = ks.value_and_grad(
            loss_of_batch, variables, has_aux=True
        )()
        optimizer.apply(gradients, variables)
        train_accuracy.update_state(labels, logits)
        return loss

    def test_step(images, labels):
        test_accuracy.update_state(labels, model(images, training=False))

    def test():
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        accuracy = float(test_accuracy.result())
        test_accuracy.reset_state()
        return accuracy

    best = -1.0
    for epoch in range(options.epochs):
        total = 0.0
        for batch in train_batches:
            losses = strategy.run(train_step, args=batch)
            total += float(strategy.reduce("SUM", losses))
        accuracy = test()
        print(
            f"epoch {epoch + 1}: loss {total / -(-len(x_train) // GLOBAL_BATCH):.4f}, "
            f"accuracy {float(train_accuracy.result()):.4f}, "
            f"test accuracy {accuracy:.4f}"
        )
        train_accuracy.reset_state()
        if accuracy > best:
            best = accuracy
            model.save_weights(checkpoint)

    # Loading writes to all replicas.
    model.load_weights(checkpoint)
    reached = test()
    print(f"the best weights again: test accuracy {reached:.4f}")
    if reached != best or reached <= ACCURACY_WANTED:
        print(f"FAILED: expected {best:.4f}, and over {ACCURACY_WANTED}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
