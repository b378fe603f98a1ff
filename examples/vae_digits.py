"""Train a variational autoencoder on two devices, and draw what it has learnt.

For each of scikit-learn's digits the encoder gives a place on a plane, with a variance.
The decoder draws a digit for each point of the plane. The random numbers of the
training are one device's, split by rows. The program is the same for every backend:

    KERAS_BACKEND=torch python examples/vae_digits.py
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

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
EPOCHS = 20
BATCH_SIZE = 64
SIDE = 12

ks.config.set_logical_devices("cpu", 2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
keras.utils.set_random_seed(SEED)

# %% [markdown]
# ## A layer that draws
#
# The layer draws a point near the mean. It also adds a loss: the Kullback-Leibler
# divergence from the normal distribution, a value for each row. Its mean is then the
# mean over the global batch. A row's noise does not depend on the number of devices.


# %%
class Sample(keras.layers.Layer):
    """A random point near the mean, with its Kullback-Leibler divergence as a loss."""

    def __init__(self):
        super().__init__()
        self.random = keras.random.SeedGenerator(SEED)

    def call(self, mean, log_variance):
        terms = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(ops.mean(-0.5 * ops.sum(terms, axis=1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.random)
        return mean + ops.exp(0.5 * log_variance) * noise


# %% [markdown]
# ## The model
#
# An encoder of two dense layers, the layer above, and a decoder. `fit` trains them on
# both devices.


# %%
def pixel_loss(wanted, drawn):
    """Return the cross-entropy of each row's pixels."""
    return ops.sum(ops.binary_crossentropy(wanted, drawn), axis=1)


with strategy.scope():
    layers = keras.layers
    decoder = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(64, "gelu"),
            layers.Dense(128, "gelu"),
            layers.Dense(64, "sigmoid"),
        ]
    )
    pixels = keras.Input((64,))
    x = layers.Dense(128, "gelu")(pixels)
    x = layers.Dense(64, "gelu")(x)
    point = Sample()(layers.Dense(2)(x), layers.Dense(2)(x))
    model = keras.Model(pixels, decoder(point))
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=pixel_loss)

# %% [markdown]
# ## Train
#
# The last of the 1,797 rows make a batch of 5, which two devices do not divide.

# %%
images = (load_digits().data / 16).astype("float32")
history = model.fit(images, images, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
loss = history.history["loss"][-1]
print(f"loss {loss:.2f} of a digit")
assert loss <= 27.0

# %% [markdown]
# ## Draw the plane
#
# The decoder draws a digit for each point of a grid. Similar digits are neighbours.

# %%
steps = np.linspace(-1.6, 1.6, SIDE, dtype="float32")
points = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
plane = decoder.predict(points, verbose=0).reshape(-1, 8, 8)
rows = plane.reshape(SIDE, SIDE, 8, 8).swapaxes(1, 2).reshape(SIDE * 8, SIDE * 8)
keras.utils.array_to_img(np.kron(rows, np.ones((4, 4)))[..., np.newaxis])
