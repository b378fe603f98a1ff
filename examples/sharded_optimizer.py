"""Share what the optimizer keeps among two devices, and train as on one.

Adam keeps twice the weights; with `shard="optimizer"` each device keeps its part. The
engines that have this are in docs/larger_models.md; on the others the file says so:

    KERAS_BACKEND=jax python examples/sharded_optimizer.py
"""

import argparse
import contextlib
import os
import sys

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategy as ks

SEED = 7
BATCH_SIZE = 64  # 1,797 rows: the last batch has 5, which two does not divide
DIFFERENCE_ALLOWED = 1e-4


def train(scope, epochs):
    """Build and train in a scope, from the same seed each time."""
    images, labels = load_digits(return_X_y=True)
    keras.utils.set_random_seed(SEED)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, "gelu"),
                keras.layers.Dense(256, "gelu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(
        (images / 16).astype("float32"),
        labels.astype("int32"),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=2,
    )
    return model


def main():
    """Train in three ways; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    ks.config.set_logical_devices("cpu", 2)
    devices = ["cpu:0", "cpu:1"]
    try:
        sharded = ks.MirroredStrategy(devices, shard="optimizer")
    except ks.errors.UnsupportedBackendError as error:
        print(f"not on {keras.backend.backend()}: {error}")
        return 0
    print(f"{keras.backend.backend()} on {sharded.num_replicas_in_sync} devices")
    for strategy in (ks.MirroredStrategy(devices), sharded):
        model = train(strategy.scope(), epochs)
        print(strategy.memory_report(model))
    expected = train(contextlib.nullcontext(), epochs).get_weights()
    difference = max(
        float(np.max(np.abs(got - want)))
        for got, want in zip(model.get_weights(), expected, strict=True)
    )
    print(f"largest weight difference to one device {difference:.1e}")
    if not difference <= DIFFERENCE_ALLOWED:  # NaN fails too
        print(f"FAILED: expected a difference of at most {DIFFERENCE_ALLOWED}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
