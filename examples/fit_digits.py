"""Train a small CNN on two devices, then on one, and compare the weights.

The data are scikit-learn's digits: 1,797 images of 8x8 pixels, shipped with it. The
program is the same for every backend:

    KERAS_BACKEND=torch python examples/fit_digits.py
"""

# %% [markdown]
# ## Set up
#
# Select the backend before Keras is imported. `NPROC` is the size of XLA's thread pool
# for CPU devices. On few cores it would be too small for two devices that wait for each
# other.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # or "jax", or "tensorflow"
os.environ.setdefault("NPROC", "8")

import contextlib

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 15
BATCH_SIZE = 64
LEARNING_RATE = 6e-3

# %% [markdown]
# ## The devices
#
# A CPU can be split into logical devices, so that the program runs on any machine. Do
# this before anything else uses a device. With GPUs, leave it out and write
# `ks.MirroredStrategy()`, which takes all of them.

# %%
ks.config.set_logical_devices("cpu", 2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")

# %% [markdown]
# ## The data
#
# The last of the batches has 29 of the 1,437 rows, which two devices do not divide. You
# need not pad or drop it.

# %%
digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target.astype("int32")
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=SEED, stratify=labels
)
print(f"{len(x_train)} training images, {len(x_test)} test images")

# %% [markdown]
# ## The model
#
# Nothing in it refers to devices. It is smooth on purpose: at the kinks of ReLU and
# max-pooling, a rounding error can turn a gradient on or off. Then two trainings that
# first differ by 1e-7 can end 1e-2 apart, on one device as well.


# %%
def build():
    """Return a compiled CNN, its learning rate falling to 0 over EPOCHS epochs."""
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
    steps = EPOCHS * -(-len(x_train) // BATCH_SIZE)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# %% [markdown]
# ## Train on two devices
#
# Build the model in the scope of the strategy. `fit` then trains it on all devices. The
# seed sets the initial weights and the order of the rows.


# %%
def train(scope):
    """Return the weights and the test accuracy of a training in the scope."""
    keras.utils.set_random_seed(SEED)
    with scope:
        model = build()
    model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)
    print(f"test accuracy {accuracy:.4f}")
    return model.get_weights(), accuracy


weights, accuracy = train(strategy.scope())

# %% [markdown]
# ## Train on one device
#
# The same function without a strategy. The losses of the epochs are equal.

# %%
print(f"{keras.backend.backend()} on one device")
expected, _ = train(contextlib.nullcontext())

# %% [markdown]
# ## Compare
#
# A gradient that is added up in two parts rounds differently, and every step carries
# the rounding on. It stays far below 1e-4. A wrong gradient does not.

# %%
difference = max(
    float(np.max(np.abs(got - want)))
    for got, want in zip(weights, expected, strict=True)
)
print(f"largest weight difference {difference:.1e}")
assert difference <= 1e-4
assert accuracy > 0.97
