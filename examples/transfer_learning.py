"""Train on two devices on the digits 0 to 4, then learn 5 to 9 from thirty images.

The layers of the first training are frozen, and only a new last layer is trained.
Beside it the same network learns the thirty images from nothing, with all its layers.
The program is the same for every backend:

    KERAS_BACKEND=jax python examples/transfer_learning.py
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

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
EPOCHS = 6
FEW = 30
BATCH_SIZE = 64

ks.config.set_logical_devices("cpu", 2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
keras.utils.set_random_seed(SEED)

# %% [markdown]
# ## The data
#
# All images of 0 to 4, thirty of 5 to 9, and the rest of these for the test.

# %%
digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target.astype("int32")
x_first, y_first = images[labels < 5], labels[labels < 5]
x_second, y_second = images[labels >= 5], labels[labels >= 5] - 5
x_few, y_few = x_second[:FEW], y_second[:FEW]
test_data = x_second[FEW:], y_second[FEW:]

# %% [markdown]
# ## The model
#
# A body that sees strokes, and a last layer for five digits.


# %%
def make_body():
    """Return the layers that see strokes."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.Flatten(),
        ]
    )


def add_head(body):
    """Return a compiled model of a body and a new last layer."""
    model = keras.Sequential([body, keras.layers.Dense(5)])
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# %% [markdown]
# ## Train on 0 to 4

# %%
with strategy.scope():
    body = make_body()
    model = add_head(body)
print("0 to 4")
history = model.fit(x_first, y_first, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)

# %% [markdown]
# ## Freeze the body
#
# Compile after you freeze: a model trains what is trainable when it is compiled.

# %%
body.trainable = False
frozen = body.get_weights()
with strategy.scope():
    models = {"transferred": add_head(body), "from nothing": add_head(make_body())}

# %% [markdown]
# ## Train on 5 to 9
#
# Thirty rows are one batch of 15 rows for each device.

# %%
reached = {}
for name, model in models.items():
    print(f"5 to 9, {name}")
    model.fit(
        x_few,
        y_few,
        batch_size=BATCH_SIZE,
        epochs=5 * EPOCHS,
        validation_data=test_data,
        validation_batch_size=512,
        verbose=2,
    )
    reached[name] = model.evaluate(*test_data, batch_size=512, verbose=0)[1]

# %% [markdown]
# ## The result
#
# The frozen layers keep all their bits. On this small task, the transferred layers do
# not always win.

# %%
print(", ".join(f"{name} {value:.3f}" for name, value in reached.items()))
assert all(map(np.array_equal, body.get_weights(), frozen))
assert reached["transferred"] >= 0.75
