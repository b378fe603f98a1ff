"""Train a small transformer on two devices to write like Python's own documentation.

The text is `pydoc_data.topics`, which every Python has: half a million characters. The
model sees 64 characters and says the next one of each. The file is the same for every
backend:

    KERAS_BACKEND=jax python examples/text_transformer.py
"""

import argparse
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

from pydoc_data.topics import topics

import keras
import numpy as np

import keras_strategy as ks

SEED = 7
EPOCHS = 4
LENGTH = 64
WIDTH = 48
BATCH_SIZE = 64  # 1,000 rows: the last batch has 40
ROWS = 1000
# What is said by counting letters alone: exp(-sum p log p) of the text is about 23.
PERPLEXITY_WANTED = 18.0


def load():
    """Return the characters there are, and the text as their numbers."""
    text = "".join(topics[name] for name in sorted(topics))
    text = "".join(letter for letter in text if letter == "\n" or " " <= letter <= "~")
    letters = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(letters)}
    return letters, np.array([numbers[letter] for letter in text], "int32")


class Positions(keras.layers.Layer):
    """Adds to each place of a row what is learnt of the place."""

    def build(self, shape):
        self.places = self.add_weight(shape=shape[1:], name="places")

    def call(self, x):
        return x + self.places


def build(count):
    """Return a compiled transformer of one block."""
    layers = keras.layers
    letters = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(count, WIDTH)(letters))
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)
    x = x + attention(normal, normal, use_causal_mask=True)
    hidden = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dropout(0.1)(layers.Dense(WIDTH)(hidden))
    model = keras.Model(letters, layers.Dense(count)(layers.LayerNormalization()(x)))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-2, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def write(model, letters, numbers, more):
    """Return a text that begins with the first numbers, and more letters."""
    random = np.random.default_rng(SEED)
    written = list(numbers)
    for _ in range(more):
        row = np.array([written[-LENGTH:]], "int32")
        logits = model.predict_on_batch(row)[0, -1].astype("float64")
        chances = np.exp(logits / 0.6 - np.max(logits / 0.6))
        written.append(random.choice(len(letters), p=chances / chances.sum()))
    return "".join(letters[number] for number in written)


def main():
    """Train, write some text, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--letters", type=int, default=120, help="how many to write")
    options = parser.parse_args()

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    letters, text = load()
    begins = np.random.default_rng(SEED).integers(len(text) - LENGTH, size=ROWS)
    rows = text[begins[:, np.newaxis] + np.arange(LENGTH + 1)]

    with strategy.scope():
        model = build(len(letters))
    history = model.fit(
        rows[:, :-1],
        rows[:, 1:],
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        verbose=2,
    )
    print(repr(write(model, letters, text[:LENGTH], options.letters)))
    perplexity = float(np.exp(history.history["loss"][-1]))
    print(f"perplexity {perplexity:.1f} of {len(letters)} letters")
    if options.epochs >= EPOCHS and not perplexity <= PERPLEXITY_WANTED:
        print(f"FAILED: expected {PERPLEXITY_WANTED} or less")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
