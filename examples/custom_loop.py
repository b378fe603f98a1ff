"""Train a small CNN on two devices with a custom training loop.

It is the tutorial "Custom training with tf.distribute.Strategy" for every backend, on
scikit-learn's digits:

    KERAS_BACKEND=jax python examples/custom_loop.py
"""

# %% [markdown]
# ## Set up
#
# Select the backend before Keras is imported. `NPROC` is the size of XLA's thread pool
# for CPU devices. On few cores it would be too small for two devices that wait for each
# other.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "torch", or "tensorflow"
os.environ.setdefault("NPROC", "8")

import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 5
GLOBAL_BATCH = 64

ks.config.set_logical_devices("cpu", 2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
keras.utils.set_random_seed(SEED)

# %% [markdown]
# ## The data
#
# A `PyDataset` gives global batches, here in a new order in every epoch. The last one
# has 29 rows, which two devices do not divide.


# %%
class Batches(keras.utils.PyDataset):
    """Global batches of images and labels."""

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


digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target.astype("int32")
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=SEED, stratify=labels
)

# %% [markdown]
# The strategy splits each global batch by rows, a part for each device.

# %%
train_batches = strategy.experimental_distribute_dataset(
    Batches(x_train, y_train, shuffle=True)
)
test_batches = strategy.experimental_distribute_dataset(
    Batches(x_test, y_test, shuffle=False)
)

# %% [markdown]
# ## The model
#
# Create everything that has variables in the scope: the model, the optimizer and the
# metrics.

# %%
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

per_row = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

# %% [markdown]
# ## A step
#
# `strategy.run` calls the step once for each device, with that device's rows.
# `compute_average_loss` divides by the rows of the global batch, so that the devices'
# gradients add up to those of one device. `value_and_grad` computes them on every
# backend, and `apply` sums them.


# %%
def train_step(images, labels):
    """Update the weights, and return this device's part of the loss."""

    def loss_of_batch():
        logits = model(images, training=True)
        return ks.compute_average_loss(per_row(labels, logits)), logits

    variables = model.trainable_variables
    (loss, logits), gradients = ks.value_and_grad(
        loss_of_batch, variables, has_aux=True
    )()
    optimizer.apply(gradients, variables)
    train_accuracy.update_state(labels, logits)
    return loss


# %% [markdown]
# A metric counts the rows of all devices.


# %%
def test_step(images, labels):
    """Count the right answers."""
    test_accuracy.update_state(labels, model(images, training=False))


def test():
    """Return the accuracy of the test images."""
    for batch in test_batches:
        strategy.run(test_step, args=batch)
    accuracy = float(test_accuracy.result())
    test_accuracy.reset_state()
    return accuracy


# %% [markdown]
# ## The loop
#
# `reduce` adds up the losses of the devices. The best weights go into a file.

# %%
folder = tempfile.TemporaryDirectory()
checkpoint = os.path.join(folder.name, "best.weights.h5")
best = -1.0
for epoch in range(EPOCHS):
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

# %% [markdown]
# ## The best weights
#
# Loading writes to all devices.

# %%
model.load_weights(checkpoint)
reached = test()
print(f"the best weights again: test accuracy {reached:.4f}")
assert reached == best
assert reached > 0.9
